"""`python -m nanodag.api --model NAME=FOLDER`: the API without a page."""

import sys

from nanodag.api.command import main

if __name__ == "__main__":
    sys.exit(main())
