"""The words that readers search for, and the page that they should find first.

They are entries of the general index, which Sphinx's search ranks above titles.
"""

from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

KEYWORDS = {
    "install": "install, installation, pip, cuda, gpu, tpu, windows, macos, extras",
    "quick_start": "getting started, tutorial, quickstart",
    "algorithms": (
        "which buffer, algorithm, dqn, double dqn, rainbow, sac, td3, ddpg, drqn, "
        "dreamer, dreamerv3, iql, cql, behaviour cloning, rlpd"
    ),
    "agents": "examples, example agents, c51, minatar, pendulum, flax, learning curve",
    "comparison": "comparison, reverb, cpprb, dopamine, alternatives",
    "performance": "benchmark, benchmarks, speed, throughput, fast",
    "troubleshooting": (
        "out of memory, oom, error, invalid buffer, deleted or donated, "
        "donation is not implemented, retrace, slow, faq"
    ),
    "use/loop": "python loop, pytorch, torch, numpy",
    "use/units": "atari, frame stack, frames, n-step, nstep, sequence, window, burn-in",
    "use/schedules": "soft reset, soft resets, anneal, beta, schedule, mixture, demonstrations",
    "use/storages": "disk, files, memmap, memory-mapped",
    "use/checkpoints": "save, load, checkpoint, checkpoints",
    "use/datasets": "dataset, datasets, offline, minari, d4rl, lerobot, rlds",
    "use/devices": "shard, sharding, multi-gpu, pmap, shard_map, mesh",
    "use/remote": "ray, ape-x, apex, distributed, actor",
    "use/parts": "custom, extend, own sampler, plugin",
    "use/writers": "reservoir, fifo, full buffer",
    "guides/larger-than-the-gpu": "memory, gpu memory, images, pixels",
    "guides/ppo": "ppo, a2c, grpo, on-policy, rollout, minibatches, groups of completions",
    "guides/hindsight": "her, hindsight, goal, goals",
    "guides/resume": "resume, preemption, sigterm, continue training",
    "guides/r2d2": "r2d2, recurrent, lstm, rnn, hidden state",
    "guides/gymnasium": "gymnasium, gym, vector environments, autoreset",
    "guides/purejaxrl-prioritized": "prioritized replay, per, purejaxrl, gymnax",
    "guides/search": "muzero, alphazero, efficientzero, mcts, reanalyse, mctx",
    "guides/multi-agent": "multi-agent, marl, qmix, vdn, jaxmarl",
    "guides/in-place": "copy, in place, donate, donation, doctor, donate_argnums",
    "guides/vmapped-agents": "vmap, seeds, population",
}
"""For each page, words with commas between."""


def words(page: str) -> list[str]:
    """Returns the words that lead to a page."""
    listed = KEYWORDS.get(page, "")
    return [word.strip() for word in listed.split(",") if word.strip()]


class Keywords(SphinxTransform):
    """Adds the entries of a page to the general index."""

    default_priority = 800  # before Sphinx collects the entries of the index

    def apply(self, **_: Any) -> None:
        """Called by Sphinx with each page."""
        section = next(self.document.findall(nodes.section), None)
        listed = words(self.env.docname)
        if section is None or not listed:
            return
        # Without an anchor, a search counts the entry and the page as one result.
        entries = [("single", word, "", "main", None) for word in listed]
        # After the title, which a search would not find behind it.
        section.insert(1, addnodes.index(entries=entries))


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_transform(Keywords)
