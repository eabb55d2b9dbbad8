"""Executes plans; the only room with torch and state: device, KV store, plan to tensors, forward, sample."""
