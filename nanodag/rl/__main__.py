"""`python -m nanodag.rl job.json`: the RL stage (nanodag.rl.control.controller)."""

from nanodag.rl.control.controller import main

if __name__ == "__main__":
    main()
