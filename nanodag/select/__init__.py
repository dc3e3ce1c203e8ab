"""The worker of kind `select`: an RL stage that samples alone, and keeps the best answers. No torch here."""
