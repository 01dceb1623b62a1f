"""Heartbeats: what a rank writes and reads of others, and the diagnosis that follows."""
