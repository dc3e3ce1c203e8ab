"""The data between samplers and trainer: records, prompts, segments, turns, filters, staleness."""
