"""The loop that owns prompts, ledger and clock. No torch here."""
