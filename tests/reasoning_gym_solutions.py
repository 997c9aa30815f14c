"""Right answers to questions of reasoning_gym that come without one, because many are right."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

Entry = Mapping[str, Any]


def right_answer(name: str, entry: Entry) -> str:
    return SOLVERS[name](entry) if name in SOLVERS else str(entry["answer"])


def _boxes(entry: Entry) -> str:
    """Every box, one after the other, along the rows and then along the columns to a target of its colour."""
    squares = entry["metadata"]["initial_state"]
    plan: list[dict[str, str]] = []
    free = [(square, item) for square, items in squares.items() for item in items if item.startswith("target_")]
    for square, items in squares.items():
        for box in (item for item in items if item.startswith("box_")):
            goal = next(place for place in free if place[1] == box.replace("box_", "target_"))
            free.remove(goal)
            here = square
            for there in _path(square, goal[0]):
                plan.append({f"Agent[{_place(here)}]": f"move({box}, square[{_place(there)}])"})
                here = there
            plan.append({f"Agent[{_place(here)}]": f"move({box}, {goal[1]})"})
    return json.dumps(plan)


def _place(square: str) -> str:
    return square.replace("_", ", ")


def _path(start: str, goal: str) -> Iterator[str]:
    (x, y), (to_x, to_y) = (map(float, square.split("_")) for square in (start, goal))
    while (x, y) != (to_x, to_y):
        if x != to_x:
            x += 1 if to_x > x else -1
        else:
            y += 1 if to_y > y else -1
        yield f"{x}_{y}"


def _colours(entry: Entry) -> str:
    puzzle = entry["metadata"]["puzzle"]
    vertices, edges = puzzle["vertices"], [tuple(edge) for edge in puzzle["edges"]]
    chosen: dict[Any, Any] = {}

    def fits(vertex: Any, colour: Any) -> bool:
        others = [b if a == vertex else a for a, b in edges if vertex in (a, b)]
        return all(chosen.get(other) != colour for other in others)

    def fill(place: int) -> bool:
        if place == len(vertices):
            return True
        for colour in puzzle["color_options"]:
            if fits(vertices[place], colour):
                chosen[vertices[place]] = colour
                if fill(place + 1):
                    return True
                del chosen[vertices[place]]
        return False

    assert fill(0)
    return json.dumps({str(vertex): colour for vertex, colour in chosen.items()})


def _cars(entry: Entry) -> str:
    """Breadth first, by the package's own board."""
    from reasoning_gym.games.rush_hour import Board

    start = entry["metadata"]["board_config"]
    labels = [chr(ord("A") + number) for number in range(len(set(start) - {"o", "x"}))]  # as it is shown
    seen, front = {str(Board(start))}, [""]
    for _ in count():
        reached = []
        for moves in front:
            for label in labels:
                for step in ("+1", "-1"):
                    board = Board(start)
                    board.perform_moves(f"{moves} {label}{step}")
                    if board.solved:
                        return f"{moves} {label}{step}"
                    if str(board) not in seen:
                        seen.add(str(board))
                        reached.append(f"{moves} {label}{step}")
        front = reached
        assert front
    raise AssertionError


SOLVERS: dict[str, Callable[[Entry], str]] = {
    "boxnet": _boxes,
    "graph_color": _colours,
    "propositional_logic": lambda entry: str(entry["metadata"]["example_answer"]),
    "rubiks_cube": lambda entry: str(entry["metadata"]["example_correct_answer"]),
    "rush_hour": _cars,
}
