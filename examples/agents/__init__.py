"""Agents in one file each, which learn inside one jitted function; see docs/agents.md.

They need the extra `agents`.
"""
