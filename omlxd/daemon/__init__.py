"""Owns the state: pool, enforcer, HTTP server, files and life cycle, on one asyncio loop."""
