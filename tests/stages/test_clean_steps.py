"""All steps of curation together, in their order: each row that leaves has one reason, what stays is whole and unmasked only
where nobody's data stood, and the result does not depend on who did the work."""

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from stages.artifacts import Corpus
from stages.clean import CleanConfig, CleanResources, Kind, clean
from stages.contract import STAGES, Context, Executor, StageError
from stages.text.curation import C4, Decontamination, Gopher, Language, NearDuplicates, Pii, Quality, UnicodeRepair
from stages.text.decontaminate import words_of
from stages.text.record import Record, canonical
from tests.stages.test_clean_curation import chat, digest, dropped, inline, rows_of, table, texts

MakeContext = Callable[..., Context]
PLAIN = """the of and to in that is was for it with as his on be at by had not are but from or have an they which one you were
all her she there would their we him been has when who will no more if out so said what up its about than into them can only
other time new some could these two may first then do any like my now over such our man me even most made after also did"""
WORDS = PLAIN.split()
QUALITY = Quality(gopher=Gopher(min_words=20, min_stop_words=0), repetition=None, c4=None, fineweb=None)


def prose_of(seed: int, words: int = 60) -> str:
    chance = random.Random(seed)
    return " ".join(chance.choice(WORDS) for _ in range(words))


def row(number: int) -> str:
    return f"row:{number:09d}"


def everything(tmp_path: Path, resources: CleanResources) -> CleanConfig:
    exam = tmp_path / "exam.jsonl"
    if not exam.exists():
        exam.write_text(json.dumps({"question": prose_of(1_000, 30), "choices": [prose_of(1_001, 15), "no"]}) + "\n")
    return CleanConfig(
        unicode_repair=UnicodeRepair(),
        quality=QUALITY,
        language=Language(keep=["en"]),
        near_duplicates=NearDuplicates(),
        decontamination=Decontamination(tasks={"exam": str(exam)}),
        pii=Pii(),
        validation_fraction=0.3,
        examples_per_reason=1,
        resources=resources,
    )


def messy() -> tuple[list[Record], dict[str, tuple[str, str]]]:
    """150 rows of prose and 10 that leave; and why."""
    given = [f"{prose_of(i)} number {i}" for i in range(150)]
    changed = given[7].split()
    changed[-3] = "altered"
    given += [
        given[3],  # 150
        given[4] + "  \r\n",
        "too few words of prose here",
        "the " * 5,  # 153, again at 154: a duplicate before it is short
        "the " * 5,
        "Das ist ein deutscher Satz und er handelt von der Sprache, in der er geschrieben ist. " * 3,
        " ".join(changed),
        f"{prose_of(60)} {prose_of(1_000, 30).upper()} {prose_of(61)}",  # 157
        f"{prose_of(62)} schÃ¶n {prose_of(63)} write to ann@firm.co.uk now",
        "x" * 201_000,
        f"{prose_of(60)} {prose_of(1_000, 30)} {prose_of(61)}",  # 160: of 157, which leaves later
    ]
    reasons = {
        row(150): ("exact_duplicate", f"of {row(3)}"),
        row(151): ("duplicate", f"of {row(4)}"),
        row(152): ("gopher_few_words", ""),
        row(153): ("gopher_few_words", ""),
        row(154): ("exact_duplicate", f"of {row(153)}"),
        row(155): ("language_other", "de 1.00"),
        row(156): ("near_duplicate", f"of {row(7)}"),
        row(157): ("contaminated", "exam 0.200"),
        row(159): ("too_long", "201000 characters"),
        row(160): ("near_duplicate", f"of {row(157)}"),
    }
    return texts(given), reasons


def checked(corpus: Corpus, given: list[Record], reasons: dict[str, tuple[str, str]]) -> None:
    assert dropped(corpus) == reasons
    kept = {found["id"]: found["text"] for found in table(corpus)}
    expected = {record.id: record.text for record in given if record.id not in reasons}
    expected[row(158)] = expected[row(158)].replace("schÃ¶n", "schön").replace("ann@firm.co.uk", "<EMAIL>")
    assert kept == expected
    facts = corpus.summary()
    steps = {step["step"]: step for step in facts["waterfall"]}
    assert list(steps) == [
        *("in", "normalise", "too_short", "too_long", "exact_duplicate", "duplicate"),
        *("gopher_few_words", "language_other", "near_duplicate", "contaminated", "rewritten", "out"),
    ]
    for unit in ("rows", "characters"):
        left = sum(step[unit] for name, step in steps.items() if name not in ("in", "out"))
        assert steps["in"][unit] - left == steps["out"][unit]
    assert steps["rewritten"]["characters"] == len("ann@firm.co.uk") - len("<EMAIL>")
    assert (facts["masked"], facts["contaminated"], facts["split_overlap"]) == ({"EMAIL": 1}, {"exam": 1}, 0)
    assert facts["sources"][0]["languages"] == {"en": len(kept)}
    assert set(facts["reasons"]) == {reason for reason, _ in reasons.values()}


@pytest.mark.ray
def test_every_row_has_one_reason_and_ray_and_any_blocks_give_the_same_bytes(
    ray_session: None, make_context: MakeContext, tmp_path: Path
) -> None:
    given, reasons = messy()
    digests = set()
    for number, resources in enumerate(
        (inline(1), CleanResources(blocks=2, executor=Executor.ray), CleanResources(blocks=7, executor=Executor.inline))
    ):
        corpus = clean(everything(tmp_path, resources), make_context(), rows_of(tmp_path / str(number), given))
        digests.add(digest(corpus.local()))
    assert len(digests) == 1
    checked(corpus, given, reasons)


def test_no_n_gram_of_an_evaluation_set_survives_whatever_its_format(make_context: MakeContext, tmp_path: Path) -> None:
    exams = [prose_of(2_000 + i, 40) for i in range(4)]
    sets = tmp_path / "sets"
    (sets / "many").mkdir(parents=True)
    (sets / "a.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": exams[0]}]}) + "\n")
    (sets / "b.txt").write_text(exams[1])
    pyarrow.parquet.write_table(pyarrow.table({"q": [exams[2]], "n": [[7]]}), sets / "many" / "c.parquet")
    (sets / "many" / "d.csv").write_text(f'stem,text\n1,"{exams[3]}"\n')
    tasks = {"chat": str(sets / "a.jsonl"), "book": str(sets / "b.txt"), "many": str(sets / "many")}
    given = texts([prose_of(i) for i in range(80)] + [f"{prose_of(90 + i)} {exam}" for i, exam in enumerate(exams)])
    given += [chat(0, exams[1], "yes")]
    given = sorted(given, key=lambda record: record.id)
    config = CleanConfig(decontamination=Decontamination(tasks=tasks), validation_fraction=0.3, resources=inline())
    corpus = clean(config, make_context(), rows_of(tmp_path / "in", given))
    assert {row_id: detail.split()[0] for row_id, (_, detail) in dropped(corpus).items()} == {
        row(80): "chat",
        row(81): "book",
        row(82): "many",
        row(83): "many",
        "chat:000000000": "book",
    }
    assert corpus.summary()["contaminated"] == {"chat": 1, "book": 2, "many": 2}
    ngrams = {tuple(words_of(exam)[at : at + 13]) for exam in exams for at in range(28)}
    for found in table(corpus):
        words = words_of(found["text"])
        assert not ngrams & {tuple(words[at : at + 13]) for at in range(len(words))}
    lenient = Decontamination(tasks=tasks, max_overlap=0.6)
    config = CleanConfig(decontamination=lenient, validation_fraction=0.3, resources=inline())
    assert set(dropped(clean(config, make_context(), rows_of(tmp_path / "in2", given)))) == {"chat:000000000"}


def test_all_that_is_learned_is_compared_with_all_that_an_evaluation_row_says(
    make_context: MakeContext, tmp_path: Path
) -> None:
    exams = [prose_of(3_000 + i, 30) for i in range(6)]
    asked = {"role": "user", "content": "q"}
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"x": [{"y": exams[2]}]})}}
    sets: list[dict[str, Any]] = [
        {"prompt": "q", "completion": "a", "solution": exams[0]},
        {"messages": [asked, {"role": "assistant", "content": "a", "thinking": exams[1]}]},
        {"messages": [asked, {"role": "assistant", "content": None, "tool_calls": [call]}]},
        {"text": exams[3]},
        {"messages": [asked | {"content": "short"}, {"role": "assistant", "content": "text"}], "note": "b"},
        {"instruction": exams[4], "output": "", "label": False},
        {"prompt": "q", "chosen": "a", "rejected": exams[5]},
    ]
    (tmp_path / "exam.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sets))
    said: list[dict[str, Any]] = [{"content": exams[0]}, {"content": "b", "reasoning_content": exams[1]}]
    said += [{"content": "c", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": value}}]}
             for value in ({"x": exams[2]}, {"x": [{"y": f"so {exams[3]}"}]})]  # fmt: skip
    said += [{"content": "text", "reasoning_content": "why so"}, {"content": exams[4]}, {"content": exams[5]}]
    said += [{"content": "d", "reasoning_content": prose_of(4_000, 30)}]
    given = [
        Record(f"c:{n:09d}", "c", "chat", messages=canonical([{"role": "user", "content": "short"}, {"role": "assistant", **m}]))
        for n, m in enumerate(said)
    ]  # fmt: skip
    given += texts([prose_of(i) for i in range(40)])
    config = CleanConfig(
        decontamination=Decontamination(tasks={"exam": str(tmp_path / "exam.jsonl")}), validation_fraction=0.3,
        resources=inline(),
    )  # fmt: skip
    corpus = clean(config, make_context(), rows_of(tmp_path / "in", sorted(given, key=lambda record: record.id)))
    assert {name for name, (reason, _) in dropped(corpus).items() if reason == "contaminated"} == {
        f"c:{n:09d}" for n in range(7)
    }


def test_evaluation_sets_are_known_by_their_content_and_one_that_says_nothing_is_refused(
    make_context: MakeContext, tmp_path: Path
) -> None:
    class Digests:
        def path(self, path: Path) -> str:
            return f"digest of {path.read_text()}"

    sources = STAGES[CleanConfig].sources
    assert sources is not None
    found = []
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / f"{place}.jsonl").write_text('{"text": "a"}\n')
        config = CleanConfig(decontamination=Decontamination(tasks={"t": str(tmp_path / place / f"{place}.jsonl")}))
        found.append(sources(config, Digests()))  # type: ignore[arg-type]
    assert found[0] == found[1] == {"decontamination.t.0.jsonl": 'digest of {"text": "a"}\n'}
    (tmp_path / "two" / "two.jsonl").rename(tmp_path / "two" / "two.txt")  # another name's end: read as something else
    config = CleanConfig(decontamination=Decontamination(tasks={"t": str(tmp_path / "two" / "two.txt")}))
    assert sources(config, Digests()) != found[0]  # type: ignore[arg-type]
    assert sources(CleanConfig(), Digests()) == {}  # type: ignore[arg-type]
    rows = rows_of(tmp_path / "in", texts(["a"]))
    for content, message in (
        ('{"text": " "}\n', r"decontamination\.tasks\.t=.*found no text"),
        ('{"text": "a"}\n{"secret\n', r"decontamination\.tasks\.t: bad\.jsonl:2: .*mend or remove it"),
    ):
        (tmp_path / "bad.jsonl").write_text(content)
        bad = Decontamination(tasks={"t": str(tmp_path / "bad.jsonl")})
        with pytest.raises(StageError, match=message) as caught:
            clean(CleanConfig(decontamination=bad, resources=inline()), make_context(), rows)
        assert "secret" not in str(caught.value)


def test_rules_for_prose_are_asked_of_text_alone_unless_other_kinds_are_named(
    make_context: MakeContext, tmp_path: Path
) -> None:
    given = [
        *(chat(i, f"short {i}", "yes") for i in range(40)),
        *(Record(f"pc:{i:09d}", "pc", "prompt_completion", prompt="1+1=", text=f"{i}") for i in range(40)),
        *texts([prose_of(i) for i in range(40)] + ["short"]),
    ]
    lost = {}
    for name, kinds in (("default", [Kind.text]), ("both", [Kind.text, Kind.prompt_completion]), ("chat", [Kind.chat])):
        config = CleanConfig(quality=QUALITY, prose_kinds=kinds, validation_fraction=0.3, resources=inline())
        corpus = clean(config, make_context(), rows_of(tmp_path / name, given))
        lost[name] = Counter(row_id.partition(":")[0] for row_id in dropped(corpus))
    assert lost == {"default": {"row": 1}, "both": {"row": 1, "pc": 40}, "chat": {"chat": 40}}
    with pytest.raises(ValueError, match="prose_kinds is empty"):
        CleanConfig(quality=QUALITY, prose_kinds=[])


def test_lines_that_do_not_count_leave_a_text_where_that_is_asked_for(
    make_context: MakeContext, tmp_path: Path
) -> None:
    c4 = C4(remove_lines=True, min_sentences=0)
    quality = Quality(gopher=None, repetition=None, fineweb=None, c4=c4)
    given = [f"A line of prose number {i}.\nno\nIt goes on here.[3]" for i in range(60)]
    corpus = clean(
        CleanConfig(quality=quality, validation_fraction=0.3, resources=inline()),
        make_context(),
        rows_of(tmp_path / "in", texts(given)),
    )
    assert [found["text"] for found in table(corpus)] == [
        f"A line of prose number {i}.\nIt goes on here." for i in range(60)
    ]
    rewritten = next(step for step in corpus.summary()["waterfall"] if step["step"] == "rewritten")
    assert rewritten == {"step": "rewritten", "rows": 0, "characters": 60 * len("no\n[3]")}


def test_personal_data_is_masked_in_what_messages_say_and_calls_pass_and_nothing_else_moves(
    make_context: MakeContext, tmp_path: Path
) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "mail", "arguments": {"to": ["ann@firm.co.uk"], "n": 1e5}},
    }

    def messages(address: str, called: dict[str, Any]) -> str:
        turns = [
            {"role": "user", "content": f"e\u0301 write \r\n {address} "},
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "content": f"sent to {address}", "tool_call_id": "c1", "name": "ann@firm.co.uk"},
            {"role": "assistant", "content": "done", "reasoning_content": address},
        ]
        return canonical(turns)

    arguments = {"to": ["<EMAIL>"], "n": 1e5}
    masked_call = {**call, "function": {"name": "mail", "arguments": arguments}}
    given = [Record("a:000000001", "s", "chat", messages=messages("ann@firm.co.uk", call), tools='[{"name":"mail"}]')]
    given += [chat(i, f"say {i}", " yes\r\n") for i in range(60)]
    given += [
        Record(
            "p:000000000",
            "s",
            "preference",
            messages=given[5].messages,
            chosen=messages("bob@firm.co.uk", call),
            rejected=given[7].messages,
        )
    ]
    corpus = clean(
        CleanConfig(pii=Pii(), validation_fraction=0.3, resources=inline()),
        make_context(),
        rows_of(tmp_path / "in", given),
    )
    found = {row["id"]: row for row in table(corpus)}
    assert found["a:000000001"]["messages"] == messages("<EMAIL>", masked_call)
    assert found["a:000000001"]["tools"] == '[{"name":"mail"}]'
    assert found["p:000000000"]["chosen"] == messages("<EMAIL>", masked_call)
    assert [found[record.id]["messages"] for record in given[1:61]] == [record.messages for record in given[1:61]]
    assert corpus.summary()["masked"] == {"EMAIL": 8}


@pytest.mark.parametrize("near", [None, NearDuplicates(remove=False)])
def test_rows_that_masks_make_equal_stand_on_one_side(
    near: NearDuplicates | None, make_context: MakeContext, tmp_path: Path
) -> None:
    given = [f"mail {i % 30} to ann{i}@firm.co.uk" for i in range(120)]
    config = CleanConfig(pii=Pii(), near_duplicates=near, validation_fraction=0.5, resources=inline())
    corpus = clean(config, make_context(), rows_of(tmp_path / "in", texts(given)))
    sides = {(found["text"], found["split"]) for found in table(corpus)}
    assert len(table(corpus)) == 120 and len(sides) == 30 and {side for _, side in sides} == {"train", "validation"}
    assert corpus.summary()["split_overlap"] == 0


def test_examples_show_no_personal_data_that_the_corpus_must_not_hold(
    make_context: MakeContext, tmp_path: Path
) -> None:
    given = [f"text {i}" for i in range(60)] + ["mail ann@firm.co.uk", "mail ann@firm.co.uk"]
    config = CleanConfig(pii=Pii(), examples_per_reason=3, validation_fraction=0.3, resources=inline())
    corpus = clean(config, make_context(), rows_of(tmp_path / "in", texts(given)))
    shown = (corpus.local() / "dropped" / "examples.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in shown] == ["mail <EMAIL>"]


def test_a_language_that_cannot_be_told_is_refused_before_any_work(make_context: MakeContext, tmp_path: Path) -> None:
    config = CleanConfig(language=Language(keep=["en", "xx"]), resources=inline())
    with pytest.raises(StageError, match=r"^stages\.clean\.language\.keep names xx, which cannot be told; known: .*en"):
        clean(config, make_context(), rows_of(tmp_path / "in", texts(["a"])))


def test_a_long_system_message_does_not_make_chats_alike(make_context: MakeContext, tmp_path: Path) -> None:
    rules = prose_of(5, 400)
    given = [
        Record(
            f"c:{i:09d}",
            "s",
            "chat",
            messages=canonical(
                [
                    {"role": "system", "content": rules},
                    {"role": "user", "content": prose_of(i, 12)},
                    {"role": "assistant", "content": prose_of(500 + i, 12)},
                ]
            ),
        )
        for i in range(60)
    ]
    config = CleanConfig(near_duplicates=NearDuplicates(), validation_fraction=0.3, resources=inline())
    assert not dropped(clean(config, make_context(), rows_of(tmp_path / "in", given)))
