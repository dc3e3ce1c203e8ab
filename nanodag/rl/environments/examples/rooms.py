"""A text game: a house of rooms, a key in one of them, a chest in another. The seed lays it out.

The policy writes one command a turn: `go north` (east, south, west), `take key`, `open chest`. The key brings half of
the reward, the open chest the rest, which ends the game.
"""

import random
from collections.abc import Mapping
from typing import Any

from nanodag.errors import ConfigError
from nanodag.rl.environments.environment import Action, Observation

NAMES = ("hall", "kitchen", "cellar", "attic", "study", "garden", "library", "bedroom", "porch", "workshop")
WAYS = {"north": (0, 1), "east": (1, 0), "south": (0, -1), "west": (-1, 0)}
Place = tuple[int, int]
RULES = (
    "Find the key, then open the chest. Write one command: go north, go east, go south, go west, take key, open chest."
)


class Rooms:
    """num_rooms: of the house. max_commands: after so many the game is over."""

    def __init__(self, *, num_rooms: int = 4, max_commands: int = 12) -> None:
        if not 2 <= num_rooms <= len(NAMES):
            raise ConfigError(f"num_rooms is {num_rooms}; a house has 2 to {len(NAMES)} rooms")
        self._num_rooms, self._max_commands = num_rooms, max_commands

    def reset(self, *, seed: int, record: Mapping[str, Any]) -> Observation:
        draw = random.Random(seed)
        self._here: Place = (0, 0)
        places = [self._here]
        while len(places) < self._num_rooms:
            (x, y), (east, north) = draw.choice(places), draw.choice(list(WAYS.values()))
            if (place := (x + east, y + north)) not in places:
                places.append(place)
        self._rooms: dict[Place, str] = dict(zip(places, draw.sample(NAMES, len(places)), strict=True))
        self._key, self._chest = draw.sample(places, 2)
        self._has_key = False
        self._num_commands = self._num_wrong = 0
        return [{"role": "system", "content": RULES}, {"role": "user", "content": self._seen()}]

    def step(self, action: Action) -> tuple[Observation, float, bool, Mapping[str, Any]]:
        self._num_commands += 1
        verb, _, thing = action.text.strip().lower().partition(" ")
        reward, is_open, remark = 0.0, False, ""
        if verb == "go" and self._beyond(thing) is not None:
            self._here = self._beyond(thing) or self._here
        elif (verb, thing) == ("take", "key") and self._here == self._key and not self._has_key:
            self._has_key, reward = True, 0.5
        elif (verb, thing) == ("open", "chest") and self._here == self._chest and self._has_key:
            is_open, reward = True, 0.5
        else:
            self._num_wrong += 1
            remark = "That is not possible. "
        return remark + self._seen(), reward, is_open or self._num_commands >= self._max_commands, {}

    def metrics(self) -> dict[str, float]:
        return {"commands": self._num_commands, "wrong_commands": self._num_wrong}

    def _beyond(self, way: str) -> Place | None:
        if way not in WAYS:
            return None
        place = (self._here[0] + WAYS[way][0], self._here[1] + WAYS[way][1])
        return place if place in self._rooms else None

    def _seen(self) -> str:
        ways = ", ".join(way for way in WAYS if self._beyond(way) is not None)
        things = [" A key lies here."] * (self._here == self._key and not self._has_key)
        things += [" A chest stands here."] * (self._here == self._chest)
        return f"You are in the {self._rooms[self._here]}. You can go {ways}.{''.join(things)}"
