"""Ranks of the trainer: policy, critic, update, packing, attention, export."""
