"""Keeps trainers and engines of a cluster matched: discovery, compatibility, assignments, status.

``handlers`` and ``controller`` bring news and carry out what the pure modules decide; ``resources``, ``discovery``,
``compatibility``, ``assigning`` and ``status`` are functions of values.
"""
