"""How much of the prompts a step computes: decisions without a model."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from producers.engines.kv_pages import PAGE
from producers.engines.pace import LEAST, Budget, Pace


def test_a_budget_of_tokens_alone_is_spent_to_the_last() -> None:
    budget = Budget(100)
    assert [budget.chunk(0, 60), budget.chunk(500, 60), budget.chunk(0, 1)] == [60, 40, 0]
    assert budget.fits(10_000)
    assert budget.spent == 100


def test_tokens_with_a_context_cost_more() -> None:
    assert Budget(1000, work=400, wide=100).chunk(0, 100) == 100  # each with at most 100 before it: 2
    assert Budget(1000, work=400, wide=100).chunk(200, 100) == 100  # 4
    assert Budget(1000, work=400, wide=100).chunk(600, 100) == 48  # 8: 50, less what is no multiple of EVEN
    budget = Budget(1000, work=400, wide=100)
    assert [budget.chunk(300, 50), budget.spent] == [50, 225.0]
    assert budget.chunk(900, 100) == 15, "fewer than EVEN go as they are"


def test_the_first_chunk_of_a_step_is_never_tiny() -> None:
    budget = Budget(1000, work=1, wide=10)
    assert [budget.chunk(10_000, 500), budget.chunk(0, 5)] == [LEAST, 0]
    assert Budget(1000, work=1).chunk(0, 3) == 3
    assert Budget(4, work=1).chunk(0, 500) == 4, "tokens are a bound without exception"


def test_copies_are_work_by_the_page() -> None:
    budget = Budget(100, work=40)
    assert budget.fits(PAGE * 1000), "the first of a step goes, however long"
    budget.copy(PAGE * 30 + 1)
    assert budget.spent == 31
    assert (budget.fits(PAGE * 9), budget.fits(PAGE * 9 + 1)) == (True, False)
    assert budget.chunk(0, 50) == 9
    budget = Budget(100, work=40)
    budget.copy(PAGE * 1000)
    assert (budget.fits(1), budget.chunk(0, 50)) == (False, 0)


@given(
    tokens=st.integers(1, 5000),
    work=st.floats(0, 5000) | st.just(math.inf),
    wide=st.integers(1, 5000),
    wanted=st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 9000)), min_size=1, max_size=6),
)
def test_a_budget_is_kept_and_moves_something(
    tokens: int, work: float, wide: int, wanted: list[tuple[int, int]]
) -> None:
    budget = Budget(tokens, work, wide)
    taken = [budget.chunk(start, count) for start, count in wanted]
    assert all(0 <= one <= count for one, (_, count) in zip(taken, wanted, strict=True))
    assert taken[0] > 0
    assert sum(taken) <= tokens
    first = LEAST * (1 + (wanted[0][0] + tokens) / wide)
    assert budget.spent <= max(work, first) * (1 + 1e-9)


def test_a_step_with_prompts_is_as_long_as_was_asked() -> None:
    """Steps of 0.05 s, and 0.001 s for a token without a context: two more steps' time are 100 tokens."""
    pace = Pace(1000, gap=3, wide=500)
    assert pace.budget(decoding=True).chunk(0, 5000) == 1000, "nothing was measured yet"
    for _ in range(20):
        pace.note(0.05, 0)
        pace.note(0.05 + 0.2, 200)
    assert pace.budget(decoding=False).chunk(0, 5000) == 1000, "nobody waits for it"
    assert pace.budget(decoding=True).chunk(0, 100) == 80  # 100 / 1.2, evened
    assert pace.budget(decoding=True).chunk(1000, 60) == 32  # 100 / 3.12
    for _ in range(20):  # a machine that is twice as slow with prompts only
        pace.note(0.05 + 0.2, 100)
    assert pace.budget(decoding=True).chunk(0, 50) == 32  # 50 / 1.1
    pace.note(9.0, LEAST - 1)  # too little to tell what it costs
    assert pace.budget(decoding=True).chunk(0, 50) == 32


def test_a_pace_that_only_knows_prompts_takes_what_it_may() -> None:
    pace = Pace(300, gap=3, wide=500)
    pace.note(2.0, 300)
    assert pace.budget(decoding=True).chunk(0, 500) == 300
    pace.note(0.1, 0)
    assert pace.budget(decoding=True).chunk(0, 500) == LEAST
