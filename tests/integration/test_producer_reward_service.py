"""Rewards of a service over HTTP: a real classifier in a process of its own, and one that misbehaves in every way."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from headrace.config import EnvironmentConfig, RewardConfig
from headrace.errors import ConfigError
from producers.environments.api import Rollout
from producers.rewards.scorer import Scorer
from producers.rewards.service import Service
from producers.rewards.worker import Score

CLASSIFIER = """
import asyncio, sys
import torch
from aiohttp import web
from transformers import LlamaConfig, LlamaForSequenceClassification

torch.set_num_threads(1)

def classifier():
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2, num_labels=1, pad_token_id=0)
    return LlamaForSequenceClassification(config).eval()

@torch.no_grad()
def scores(model, texts):
    tokens = [list(text.encode()) for text in texts]
    longest = max(map(len, tokens))
    ids = torch.tensor([each + [0] * (longest - len(each)) for each in tokens])
    return model(input_ids=ids, attention_mask=(ids != 0).long()).logits[:, 0].tolist()

async def main():
    model, sizes = classifier(), []

    async def own(request):
        rollouts = (await request.json())["rollouts"]
        sizes.append(len(rollouts))
        texts = [each["prompt"] + each["completion"] for each in rollouts]
        return web.json_response({"rewards": await asyncio.to_thread(scores, model, texts), "model": "tiny"})

    async def sglang(request):
        texts = (await request.json())["text"]
        found = await asyncio.to_thread(scores, model, texts)
        return web.json_response([{"embedding": [score], "meta_info": {"id": "x"}} for score in found])

    async def seen(request):
        return web.json_response(sizes)

    app = web.Application()
    app.add_routes([web.post("/score", own), web.post("/classify", sglang), web.get("/seen", seen)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(site._server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""

OWN = """
from producers.environments.single_turn import SingleTurn

class Own:
    def __len__(self): return 1
    def eval_size(self): return 1
    def episode(self, split, index, seed): return SingleTurn("?", 1)
    def score(self, rollout): return 0.25
    def correct(self, rollout): return rollout.completion == "right"
"""


def rollout(completion: str, answer: object = 1) -> Rollout:
    return Rollout("own", 0, "Q: ", completion, (), answer, "stop")


@asynccontextmanager
async def scoring(
    folder: Path, reward: object, deadline_s: float = 5.0
) -> AsyncIterator[Callable[..., Awaitable[Score]]]:
    (folder / "own.py").write_text(OWN)
    environment = EnvironmentConfig.model_validate({"name": f"{folder}/own.py:Own", "reward": reward})
    scorer = Scorer({"own": environment}, workers=1, deadline_s=deadline_s)

    async def score(completion: str, kind: Any = "train", answer: object = 1) -> Score:
        async with asyncio.timeout(60):
            return await scorer.score("own", kind, rollout(completion, answer))

    try:
        yield score
    finally:
        await scorer.close()


@asynccontextmanager
async def serving(handler: Callable[[web.Request], Awaitable[web.StreamResponse]], port: int = 0) -> AsyncIterator[str]:
    """The URL of a service in this process that answers by `handler`."""
    app = web.Application()
    app.router.add_post("/score", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/score"
    finally:
        await runner.cleanup()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Where the classifier listens, and a function that gives its scores directly."""
    folder = tmp_path_factory.mktemp("classifier")
    (folder / "tiny_classifier.py").write_text(CLASSIFIER)
    process = subprocess.Popen([sys.executable, str(folder / "tiny_classifier.py")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        names: dict[str, Any] = {"__name__": "tiny_classifier"}
        exec(CLASSIFIER, names)
        model = names["classifier"]()
        yield f"http://127.0.0.1:{port}", lambda texts: [names["scores"](model, [text])[0] for text in texts]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_a_real_classifier_gives_its_own_scores(tmp_path: Path, classifier: Any) -> None:
    """Batched with others, each rollout has the score that the model gives it by itself."""
    url, directly = classifier
    completions = [f"{'x' * (number % 7)} answer {number}" for number in range(24)]
    expected = directly([f"Q: {completion}" for completion in completions])
    async with scoring(tmp_path, f"{url}/score", 30.0) as score:
        scores = await asyncio.gather(*map(score, completions))
    assert [each.reward for each in scores] == pytest.approx(expected, abs=1e-5)
    assert len({round(each.reward, 4) for each in scores}) > 12

    reward = {"name": f"{url}/classify", "format": "sglang", "template": "{prompt}{completion}"}
    async with scoring(tmp_path, reward, 30.0) as score:
        scores = await asyncio.gather(*map(score, completions))
    assert [each.reward for each in scores] == pytest.approx(expected, abs=1e-5)


async def test_rollouts_that_come_together_go_together(tmp_path: Path) -> None:
    sizes: list[int] = []
    busy, most, release = 0, 0, asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        nonlocal busy, most
        asked = (await request.json())["rollouts"]
        sizes.append(len(asked))
        busy += 1
        most = max(most, busy)
        if len(sizes) == 2:
            release.set()
        await release.wait()
        busy -= 1
        return web.json_response({"rewards": [float(each["completion"]) for each in asked]})

    async with serving(handler) as url, scoring(tmp_path, {"name": url, "batch": 8, "requests": 2}) as score:
        scores = await asyncio.gather(*(score(str(number)) for number in range(40)))
    assert [each.reward for each in scores] == [float(number) for number in range(40)]
    assert sizes == [8] * 5
    assert most == 2


async def test_what_a_service_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append((request.headers.get("Authorization"), await request.json()))
        return web.json_response({"rewards": [1]})

    monkeypatch.setenv("SERVICE_TOKEN", "secret")
    async with serving(handler) as url:
        async with scoring(tmp_path, {"name": url, "token_env": "SERVICE_TOKEN"}) as score:
            assert await score("right", answer={"value": [1, "é"]}) == Score(1.0, correct=True)
            assert "the rollout is not JSON" in (await score("x", answer={1, 2})).failure
        assert len(asked) == 1
        async with scoring(tmp_path, url) as score:
            assert await score("right", kind="eval") == Score(1.0, correct=True)
    (told,) = asked
    fields = {"environment": "own", "index": 0, "prompt": "Q: ", "completion": "right", "turns": [], "metadata": {}}
    expected = {**fields, "answer": {"value": [1, "é"]}, "finish_reason": "stop", "given": None}
    assert told == ("Bearer secret", {"rollouts": [expected]})


async def test_a_token_may_stand_in_a_file_and_must_be_somewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str | None] = []

    async def handler(request: web.Request) -> web.Response:
        told.append(request.headers.get("Authorization"))
        return web.json_response({"rewards": [1]})

    async with serving(handler) as url:
        reward = {"name": url, "token_env": "SERVICE_TOKEN"}
        with pytest.raises(ConfigError, match="token_env = 'SERVICE_TOKEN': this variable is not set, nor is SERVICE_"):
            async with scoring(tmp_path, reward):
                pass
        (tmp_path / "token").write_text("secret\n")
        monkeypatch.setenv("SERVICE_TOKEN_FILE", str(tmp_path / "token"))
        async with scoring(tmp_path, reward) as score:
            assert (await score("right")).reward == 1.0
    assert told == ["Bearer secret"]


async def test_a_token_that_no_header_can_hold_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "in two\nlines")

    async def never(request: web.Request) -> web.Response:
        raise AssertionError

    async with serving(never) as url, scoring(tmp_path, {"name": url, "token_env": "SERVICE_TOKEN"}) as score:
        failure = (await score("x")).failure
    assert failure.startswith("reward was refused: the service cannot be asked (ValueError: ")
    assert "in two" not in failure


async def test_a_rollout_that_comes_as_the_last_answer_does_is_asked_for() -> None:
    """Its sender has nothing left and has not yet been seen to end: nobody else would ask."""
    answered = asyncio.Event()

    class Answers(Service):
        async def _asked(self, items: Sequence[str]) -> list[Score]:
            await answered.wait()
            return [Score(1.0)] * len(items)

    async def later() -> Score:
        await answered.wait()
        return await service.score(rollout("later"))

    service = Answers(RewardConfig(name="http://127.0.0.1:9/score", requests=1), 5.0)
    first = asyncio.create_task(service.score(rollout("first")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # its sender waits for the answer
    second = asyncio.create_task(later())
    await asyncio.sleep(0)
    answered.set()
    async with asyncio.timeout(5):
        assert await first == await second == Score(1.0)
    await service.close()


async def test_errors_that_pass_are_tried_again(tmp_path: Path) -> None:
    answers = [503, 429, 500]

    async def handler(request: web.Request) -> web.Response:
        if answers:
            return web.Response(status=answers.pop())
        return web.json_response({"rewards": [2.5]})

    async with serving(handler) as url, scoring(tmp_path, url) as score:
        assert await score("x") == Score(2.5, correct=False)
    assert not answers


async def test_a_service_that_comes_back_is_reached_again(tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"rewards": [2.5]})

    async with serving(handler) as url:
        pass
    async with scoring(tmp_path, url, 30.0) as score:
        early = asyncio.create_task(score("x"))
        # The first attempts have failed by the time that a worker has loaded for this one.
        assert (await score("right", kind="eval")).reward == 1.0
        assert not early.done()
        async with serving(handler, int(url.split(":")[2].partition("/")[0])):
            assert await early == Score(2.5, correct=False)


async def test_a_bad_answer_is_a_failure(tmp_path: Path) -> None:
    bodies: dict[str, tuple[object, str]] = {
        "two": ({"rewards": [1, 2]}, "reward cannot be read: the service answered 2 rewards for 1 rollouts"),
        "none": ({"rewards": [None]}, "reward returned NoneType, not a number"),
        "text": ({"rewards": ["1"]}, "reward returned str, not a number"),
        "huge": ({"rewards": [10**400]}, "reward returned int that is no finite number"),
        "deep": ("[" * 100_000, "which is not of format 'headrace'"),
        "nan": ({"rewards": [float("nan")]}, "reward is nan, not a finite number"),
        "no list": ({"rewards": 1}, "which is not of format 'headrace'"),
        "other": ({"scores": [1]}, "which is not of format 'headrace'"),
        "bare": ([1], "which is not of format 'headrace'"),
        "no JSON": ("oops", "the service answered 'oops', which is not of format 'headrace'"),
        "empty": ("", "which is not of format 'headrace'"),
    }

    async def handler(request: web.Request) -> web.Response:
        (asked,) = (await request.json())["rollouts"]
        body, _ = bodies[asked["completion"]]
        return web.Response(text=body if isinstance(body, str) else json.dumps(body))

    async with serving(handler) as url, scoring(tmp_path, {"name": url, "batch": 1}) as score:
        for completion, (_, failure) in bodies.items():
            told = (await score(completion)).failure
            assert failure in told
            assert told.startswith("reward ")


async def test_what_a_service_refuses_fails_alone(tmp_path: Path) -> None:
    """One text that is too long takes no others of its batch with it, and is not asked again and again."""
    asked: list[list[str]] = []
    open_requests, most = 0, 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal open_requests, most
        completions = [each["completion"] for each in (await request.json())["rollouts"]]
        asked.append(completions)
        open_requests += 1
        most = max(most, open_requests)
        await asyncio.sleep(0.01)
        open_requests -= 1
        if "long" in completions:
            return web.Response(status=400, text="too long")
        return web.json_response({"rewards": [1.0] * len(completions)})

    async with serving(handler) as url, scoring(tmp_path, {"name": url, "requests": 1}) as score:
        good, bad, right = await asyncio.gather(score("good"), score("long"), score("right"))
    assert good == Score(1.0, correct=False)
    assert right == Score(1.0, correct=True)
    assert bad.failure == "reward was refused: the service answered 400 Bad Request (too long)"
    assert asked.count(["long"]) == 1
    assert most == 1


async def test_a_dead_service_fails_within_the_deadline_with_its_last_error(tmp_path: Path) -> None:
    async def hangs(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(hangs) as url, scoring(tmp_path, url, 0.5) as score:
        assert (await score("x")).failure == "reward took longer than 0.5 s"
    async with scoring(tmp_path, url, 0.5) as score:
        failure = (await score("x")).failure
    assert failure.startswith("reward took longer than 0.5 s; last, the service did not answer (ClientConnectorError")


async def test_a_rollout_that_was_cut_is_not_asked_for(tmp_path: Path) -> None:
    asked: list[str] = []
    entered, release = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        completions = [each["completion"] for each in (await request.json())["rollouts"]]
        asked.extend(completions)
        entered.set()
        await release.wait()
        return web.json_response({"rewards": [1.0] * len(completions)})

    async with serving(handler) as url, scoring(tmp_path, {"name": url, "requests": 1}) as score:
        first = asyncio.create_task(score("first"))
        await entered.wait()
        cut, last = asyncio.create_task(score("cut")), asyncio.create_task(score("last"))
        await asyncio.sleep(0)
        cut.cancel()
        await asyncio.wait({cut})
        release.set()
        assert (await first).reward == (await last).reward == 1.0
    assert asked == ["first", "last"]


async def test_a_weighted_sum_has_a_service_and_functions(tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"rewards": [len(each["completion"]) for each in (await request.json())["rollouts"]]})

    (tmp_path / "more.py").write_text("def half(rollout): return 0.5\ndef raises(rollout): raise ValueError('no')\n")
    half, raises = f"{tmp_path}/more.py:half", f"{tmp_path}/more.py:raises"
    async with serving(handler) as url:
        parts = [{"name": url, "weight": 0.1}, {"name": half, "weight": -2}, "environment"]
        async with scoring(tmp_path, parts) as score:
            expected = {url: 5.0, half: 0.5, "environment": 0.25}
            assert await score("right") == Score(pytest.approx(-0.25), correct=True, parts=expected)
        async with scoring(tmp_path, [url, raises]) as score:
            assert (await score("x")).failure == f"reward {raises!r} raised ValueError: no"
        async with scoring(tmp_path, [f"{url}s", half], 0.5) as score:
            assert (await score("x")).failure.startswith(f"reward '{url}s' was refused: the service answered 404")
