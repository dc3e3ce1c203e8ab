"""Environments to begin with: search.py, questions over a corpus that the policy searches; rooms.py, a text game.

generate: {name: "environment:nanodag.rl.environments.examples.rooms:Rooms", options: {num_rooms: 4}}
"""
