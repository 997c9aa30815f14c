"""What the configuration accepts, and what it says when it does not."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import Config
from headrace.config_sources import flatten, resolve, stored
from headrace.errors import ConfigError, Refused


def sentence(*overrides: str, environ: dict[str, str] | None = None, file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(file, environ or {}, overrides)
    return str(caught.value)


def refusal_of(override: str) -> str | None:
    try:
        resolve(None, {}, [override])
    except ConfigError as error:
        return str(error)
    return None


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\nsteps = 1\nseed = 1\n[trainer]\ngroup_size = 4\n")
    resolved = resolve(file, {"HEADRACE__RUN__STEPS": "2", "HEADRACE__RUN__SEED": "2", "PATH": "x"}, ["run.steps=3"])
    assert (resolved.config.run.steps, resolved.config.run.seed, resolved.config.trainer.group_size) == (3, 2, 4)
    assert resolved.origins == {
        "run.steps": "command line",
        "run.seed": "$HEADRACE__RUN__SEED",
        "trainer.group_size": str(file),
    }


def test_the_redis_url_is_no_configuration_key() -> None:
    assert resolve(None, {"HEADRACE_REDIS_URL": "redis://:secret@host", "HEADRACE_RUN": "r"}, ()).origins == {}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.rate=1", "trainer.rate (from command line) is not a known configuration key"),
        ("bogus.rate=1", "bogus (from command line) is not a known configuration key"),
        (
            "trainer.learning_rat=1",
            "is not a known configuration key (did you mean 'trainer.learning_rate'?); `headrace",
        ),
        ("trainr.steps=1", "trainr (from command line) is not a known configuration key (did you mean 'trainer'?)"),
        ("learning_rate=1", "(did you mean 'trainer.learning_rate'?)"),
        ("bogus=1", "bogus (from command line) is not a known configuration key"),
        ("run.steps=0", "run.steps = 0 (from command line): input should be greater than or equal to 1"),
        ("run.steps=many", "run.steps = 'many' (from command line): input should be a valid integer"),
        ("model.dtype=int4", "model.dtype = 'int4' (from command line): input should be"),
        (
            "run.placement=shared",
            "run.placement = 'shared' (from command line): input should be 'disaggregated', 'coloc",
        ),
        ("run=3", "run = 3 (from command line): input should be a valid dictionary"),
        ("environments=[]", "environments: at least one environment is needed"),
        ("environments=[{name='a'}, {name='a'}]", "environments: 'a' stands twice; give one of the two a label"),
        ("environments=[{name='a', label='b'}, {name='b'}]", "environments: 'b' stands twice"),
        (
            "environments=[{name='a', label='b c'}]",
            "environments.0.label = 'b c' (from command line): may have letters A to Z, digits, dots, underscores and",
        ),
        ('environments=[{name="a", label="b\\n"}]', "environments.0.label = 'b\\n' (from command line): may have"),
        ("environments=[{name='a', weight=0}]", "environments: every weight is 0; give those to be trained on"),
        (
            "environments=[{name='a', min_share=0.6}, {name='b', min_share=0.5}]",
            "environments: the min_share of all are 1.1 together, more than 1; lower them",
        ),
        (
            "evaluation.environment=sums",
            "evaluation.environment: 'sums' is none of the environments (arithmetic); add it to them, with weight = 0",
        ),
        ("trainer.group_size=33", "33 rollouts do not fit into producer.slots = 32"),
        ("trainer.group_size=1", "more than trainer.group_size = 1; lower it, or raise the group size"),
        ("sampling.max_new_tokens=512", "leaves no room for a prompt"),
        ("steps", "not of the form key=value"),
        ("=3", "not of the form key=value"),
        ("telemetry.port=70000", "telemetry.port = 70000"),
        (
            "run.seed=9999999999999999999999",
            "run.seed = 9999999999999999999999 (from command line): input should be less",
        ),
        (f"run.seed={'9' * 5000}", "9999' (from command line): unable to parse input string as an integer"),
        (f"run.seed=0x{'f' * 5000}", "ffff' (from command line): input should be a valid integer"),
        (f"run.seed={'[' * 3000}", "[[[[' (from command line): input should be a valid integer"),
        ("producer.lease_s=1e300", "producer.lease_s = 1e+300 (from command line): input should be less than or equal"),
        ("sampling.stop=['']", "sampling.stop.0 = '' (from command line): string should have at least 1 character"),
        ('model.path="a\\u0000b"', "model.path = 'a\\x00b' (from command line): must not contain a null character"),
        (f"run.folder={'x' * 5000}", "(from command line): is too long for a path: 5000 bytes, the longest part 5000"),
        ("model.path=\udcff", "--set 'model.path=\\udcff' is not UTF-8"),
        ("trainer.clip_low=1.5", 'trainer.clip_low = 1.5 (from command line): must be "auto" or a number from 0 to 1'),
        ("trainer.clip_high=wide", "trainer.clip_high = 'wide' (from command line): must be \"auto\" or a number from"),
        ("trainer.clip_high=true", 'trainer.clip_high = True (from command line): must be "auto" or a number from 0'),
        ("trainer.clip_high=1e13", 'trainer.clip_high = 10000000000000.0 (from command line): must be "auto" or a'),
        ("trainer.loss=ppo2", "trainer.loss: 'ppo2' is not known (did you mean 'ppo'?); use one of grpo, dr_grpo,"),
        (
            "trainer.advantage=gae",
            "trainer.advantage: 'gae' is not known; use one of grpo, dr_grpo, rloo,",
        ),
        ("trainer.mask=all", "trainer.mask = 'all' (from command line): input should be 'off', 'token' or 'sequence'"),
        (
            "trainer.minibatches=9",
            "trainer.minibatches: 9 is more than trainer.groups_per_step = 8; lower it, or raise",
        ),
        ("trainer.overlong_buffer=65", "65 is more than sampling.max_new_tokens = 64, of which it is the last part"),
        (
            "trainer.adam_betas=[0.9, 1.0]",
            "trainer.adam_betas.1 = 1.0 (from command line): input should be less than 1",
        ),
    ],
)
def test_a_refusal_names_key_value_and_origin(override: str, expected: str) -> None:
    text = sentence(override)
    assert expected in text
    assert "\n" not in text
    assert len(text) < 400


def test_every_number_has_an_upper_bound() -> None:
    """Without one, some value overflows a clock or the wire in a service that has started already."""
    schema = Config.model_json_schema()
    for name, section in schema["$defs"].items():
        for key, field in section["properties"].items():
            if field.get("type") in ("integer", "number"):
                assert "maximum" in field or "exclusiveMaximum" in field, f"{name}.{key}"


def test_no_refusal_is_a_regular_expression() -> None:
    assert '"pattern"' not in json.dumps(Config.model_json_schema()), "what is allowed is said in words"


def test_a_value_below_a_value_is_refused() -> None:
    assert "steps is a value, not a section" in sentence("run.steps=3", "run.steps.more=4")


@pytest.mark.parametrize("key", ["", ".", "run.", ".steps", "run..steps"])
def test_a_key_with_an_empty_part_is_refused(key: str) -> None:
    sentence(f"{key}=1")


def test_environment_variables_are_named_in_refusals() -> None:
    text = sentence(environ={"HEADRACE__TRAINER__LEARNING_RATE": "fast"})
    assert "trainer.learning_rate = 'fast' (from $HEADRACE__TRAINER__LEARNING_RATE)" in text


def test_an_item_of_a_list_is_named() -> None:
    text = sentence('environments=[{name="arithmetic", size=3}]')
    assert text.startswith("environments.0.size (from command line) is not a known configuration key")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[run", "is not valid TOML"),
        (b"\xff\xfe", "is not valid TOML"),
        (b"[run]\nsteps=" + b"9" * 5000, "is not valid TOML: Exceeds the limit"),
        (b"a=" + b"[" * 100_000, "is not valid TOML: maximum recursion"),
    ],
)
def test_a_damaged_file_is_refused(content: bytes, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    assert expected in sentence(file=file)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    assert "cannot be read: No such file or directory" in sentence(file=tmp_path / "missing.toml")
    assert sentence(file=Path("\0x")) == "config file '\\x00x' cannot be read: embedded null byte"
    assert "cannot be read: Is a directory" in sentence(file=tmp_path)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbf[run]\r\nsteps = 3\r\n")
    assert resolve(file, {}, ()).config.run.steps == 3


def test_an_empty_table_in_a_file_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\n[trainer]\nclip_norm = 0.5\n")
    assert resolve(file, {}, ()).config.trainer.clip_norm == 0.5
    assert resolve(file, {}, ["run.steps=5"]).config.run.steps == 5


def test_a_line_break_does_not_smuggle_in_a_second_value() -> None:
    assert resolve(None, {}, ["model.path=1\nx=2"]).config.model.path == "1\nx=2"


def test_new_prompts_for_groups_that_have_a_signal_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"signal under trainer.advantage = 'reinforce_pp'; set it to 0, or take"):
        resolve(None, {}, ["trainer.dynamic_sampling=1", "trainer.advantage=reinforce_pp"])
    assert resolve(None, {}, ["trainer.dynamic_sampling=1"]).config.trainer.dynamic_sampling == 1


@pytest.mark.parametrize("placement", ["colocated", "hybrid"])
def test_servers_keep_a_device_of_their_own(placement: str) -> None:
    with pytest.raises(ConfigError, match=f"run.placement: '{placement}' is for engines within the producer"):
        resolve(None, {}, ["producer.engine=sglang", f"run.placement={placement}"])


def test_a_number_may_stand_for_auto() -> None:
    config = resolve(None, {}, ["trainer.clip_low=1", "trainer.clip_high=0.28"]).config.trainer
    assert (config.clip_low, config.clip_high) == (1.0, 0.28)
    assert Config.model_validate_json(Config().model_dump_json()).trainer.clip_low == "auto"


def test_infinite_and_missing_numbers_are_refused() -> None:
    for value in ("nan", "inf", "-inf"):
        assert "trainer.clip_norm" in sentence(f"trainer.clip_norm={value}")


@given(st.text(max_size=30))
def test_any_text_is_a_value_or_a_sentence(text: str) -> None:
    refusal = refusal_of(f"model.path={text}")
    assert refusal is None or "model.path" in refusal


@given(st.text(max_size=12), st.text(max_size=12))
def test_any_key_is_known_or_refused(key: str, value: str) -> None:
    assert refusal_of(f"{key}={value}") != ""


def test_the_stored_tree_gives_the_same_configuration() -> None:
    config = resolve(None, {}, ['environments=[{name="a", options={x=[1, 2]}}]', "sampling.stop=['x']"]).config
    assert stored(config.model_dump(mode="json")) == config
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_a_stored_tree_of_another_release_is_one_sentence() -> None:
    with pytest.raises(Refused, match=r"another configuration: run\.pace is not a known .* the same release") as caught:
        stored({"run": {"pace": 3}})
    assert "\n" not in str(caught.value)


def test_flatten_gives_the_leaves() -> None:
    assert dict(flatten({"a": {"b": 1, "c": {}}, "d": [1]})) == {"a.b": 1, "a.c": {}, "d": [1]}


def test_environments_share_as_written() -> None:
    tenths = [{"name": f"e{i}", "min_share": 0.1} for i in range(10)]
    config = Config.model_validate({"environments": tenths, "evaluation": {"environment": "e3"}})
    assert config.evaluation.environment == ("e3",), "ten tenths are not more than one"
    one_name = [{"name": "arithmetic", "label": "easy"}, {"name": "arithmetic", "weight": 0}]
    assert [one.called for one in Config.model_validate({"environments": one_name}).environments] == [
        "easy",
        "arithmetic",
    ]


def test_evaluations_are_sampled_as_training_is_where_they_do_not_say() -> None:
    config = Config.model_validate(
        {
            "environments": [{"name": "arithmetic", "label": name} for name in "ab"],
            "sampling": {"temperature": 0.7, "top_k": 5, "stop": ["."]},
            "evaluation": {"environment": ["b", "a"], "temperature": 0.0, "max_new_tokens": 9},
        }
    )
    assert config.evaluation.environment == ("b", "a")
    sampled = config.evaluation.sampling(config.sampling)
    assert (sampled.temperature, sampled.top_k, sampled.max_new_tokens, sampled.stop) == (0.0, 5, 9, (".",))
    assert Config().evaluation.sampling(config.sampling) == config.sampling


@pytest.mark.parametrize(
    ("evaluation", "sentence"),
    [
        ({"environment": ["arithmetic", "arithmetic"]}, "'arithmetic' stands twice; leave one of the two out"),
        ({"environment": ["arithmetic", "b"]}, r"'b' is none of the environments \(arithmetic\)"),
        ({"max_new_tokens": 512}, "evaluation.max_new_tokens: 512 leaves no room for a prompt"),
        ({"every": -1}, "greater than or equal to 0"),
    ],
)
def test_evaluations_that_cannot_be(evaluation: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Config.model_validate({"evaluation": evaluation})


def test_an_environment_that_is_never_trained_on_has_no_least_share() -> None:
    both = [{"name": "arithmetic"}, {"name": "arithmetic", "label": "b", "weight": 0, "min_share": 0.5}]
    with pytest.raises(ValueError, match=r"'b' has weight = 0.*min_share = 0\.5; leave one"):
        Config.model_validate({"environments": both})
