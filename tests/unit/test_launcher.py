"""The launcher, through real processes: what it records of a run, and that nothing of a run outlives it."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e_registry.errors import StorageError, UsageError
from e2e_registry.execution.launcher import Cancellation, LaunchSpec, Outcome, child_environment, launch, log_tail
from e2e_registry.execution.supervisor import CappedLog

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="recipes run on Linux only")

ROOT = Path(__file__).parents[2]
FAST_PYTHON = [sys.executable, "-I", "-S", "-c"]

#: Ignores SIGTERM, as does everything that it starts and does not say otherwise.
STUBBORN = "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def python(code: str) -> list[str]:
    return [*FAST_PYTHON, textwrap.dedent(code)]


class Marked:
    """The processes of one test, told from all others by their environment, whatever tree they stand in."""

    def __init__(self) -> None:
        self.environment = {**os.environ, "LAUNCHER_TEST_MARK": secrets.token_hex(8)}
        self._mark = f"LAUNCHER_TEST_MARK={self.environment['LAUNCHER_TEST_MARK']}".encode()

    def pids(self, containing: str = "") -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                is_marked = entry.name.isdigit() and self._mark in (entry / "environ").read_bytes().split(b"\0")
                if is_marked and containing in (entry / "cmdline").read_bytes().decode(errors="replace"):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found


@pytest.fixture
def marked() -> Iterator[Marked]:
    processes = Marked()
    yield processes
    for pid in processes.pids():  # only after a failed test is there any
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else's process; the test must leave it alive."""
    process = subprocess.Popen(["sleep", "1234"])
    yield process
    assert process.poll() is None
    process.kill()
    process.wait()


def eventually(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Return the first true value of ``condition``."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
    return value


def spec(tmp_path: Path, command: list[str], **options: Any) -> LaunchSpec:
    defaults = {"cwd": tmp_path, "run_dir": tmp_path / "run", "environment": dict(os.environ), "timeout_s": 60.0}
    return LaunchSpec(command=command, **(defaults | options))


def run_json(tmp_path: Path) -> dict[str, Any]:
    return dict(json.loads((tmp_path / "run" / "run.json").read_text()))


def output(outcome: Outcome) -> bytes:
    return outcome.log_path.read_bytes()


def output_lines(tmp_path: Path) -> list[str]:
    """Return what was printed, without what a shell says about a command of its own that was ended."""
    lines = (tmp_path / "run" / "output.log").read_text().splitlines()
    return [line for line in lines if "Terminated" not in line]


# What a run leaves behind in its directory.


@pytest.mark.parametrize(
    ("script", "status", "exit_code", "number", "explanation"),
    [
        ("echo out; echo err >&2", "exited", 0, None, "exited with code 0"),
        ("exit 7", "exited", 7, None, "exited with code 7"),
        ("kill -KILL $$", "signaled", None, 9, "killed by SIGKILL"),
        ("kill -TERM $$", "signaled", None, 15, "killed by SIGTERM"),
        ("exec >&- 2>&-; exit 5", "exited", 5, None, "exited with code 5"),
    ],
)
def test_the_end_of_a_recipe_is_recorded(
    tmp_path: Path, script: str, status: str, exit_code: int | None, number: int | None, explanation: str
) -> None:
    before = time.time_ns()
    outcome = launch(spec(tmp_path, ["sh", "-c", script], facts={"test": "tests/e2e/a.py", "seed": 3}))

    assert (outcome.status, outcome.exit_code, outcome.signal) == (status, exit_code, number)
    assert outcome.explanation == explanation
    assert outcome.is_success == (exit_code == 0)
    assert before <= outcome.started_ns <= outcome.ended_ns <= time.time_ns()
    assert output(outcome) == (b"out\nerr\n" if exit_code == 0 else b"")
    data = run_json(tmp_path)
    assert data.pop("outcome") == outcome.to_json()
    assert data == {
        "format": 1,
        "test": "tests/e2e/a.py",
        "seed": 3,
        "command": ["sh", "-c", script],
        "cwd": str(tmp_path),
        "started_ns": outcome.started_ns,
        "ended_ns": outcome.ended_ns,
    }


def test_a_command_that_cannot_be_run_is_an_outcome(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a program")
    (tmp_path / "script").write_text("#!/no/such/interpreter\n")
    (tmp_path / "script").chmod(0o755)

    def explain(name: str, command: str, **options: Any) -> str:
        outcome = launch(spec(tmp_path, [command], run_dir=tmp_path / name, **options))
        assert (outcome.status, outcome.is_success) == ("not-started", False)
        return outcome.explanation

    assert explain("1", "no-such-command") == "command not found: no-such-command"
    assert explain("2", "./data") == "not executable: ./data"
    assert "interpreter" in explain("3", "./script")
    assert "cannot enter the working directory" in explain("4", "true", cwd=tmp_path / "nowhere")
    assert explain("5", "sleep", environment={"PATH": str(tmp_path)}) == "command not found: sleep"


def test_run_json_says_that_the_run_goes_on(tmp_path: Path) -> None:
    outcome = launch(spec(tmp_path, ["cat", "run/run.json"]))
    during = json.loads(output(outcome))
    assert (during["outcome"], during["ended_ns"], during["started_ns"]) == (None, None, outcome.started_ns)


@pytest.mark.parametrize("name", ["run.json", "output.log", "metrics.jsonl", "metrics.actor.rank3.jsonl"])
def test_a_directory_that_holds_a_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("{}")
    with pytest.raises(UsageError, match="already holds a run") as caught:
        launch(spec(tmp_path, ["touch", "started"]))
    assert caught.value.hint
    assert not (tmp_path / "started").exists()
    assert (tmp_path / "run" / name).read_text() == "{}"


@pytest.mark.parametrize("attempt", range(3))
def test_of_launches_into_one_directory_at_once_one_runs(tmp_path: Path, attempt: int) -> None:
    start = threading.Barrier(8)

    def is_launched(number: int) -> bool:
        start.wait()
        try:
            return launch(spec(tmp_path, ["sh", "-c", f"echo {number}"])).is_success
        except UsageError:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(is_launched, range(8))) == 1
    assert len((tmp_path / "run" / "output.log").read_text().split()) == 1


def test_a_directory_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(StorageError, match="cannot use as run directory"):
        launch(spec(tmp_path, ["touch", str(tmp_path / "started")], run_dir=tmp_path / "run" / "below"))
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"command": []},
        {"command": "echo one string"},
        {"command": ["echo", "a\0b"]},
        {"environment": {"A=B": "c"}},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"grace_s": -1},
        {"log_limit": 100},
    ],
)
def test_what_cannot_be_launched_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    command = options.pop("command", ["true"])
    with pytest.raises(UsageError):
        spec(tmp_path, command, **options)


def test_facts_may_not_pose_as_the_launchers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="outcome"):
        spec(tmp_path, ["true"], facts={"outcome": {"status": "exited"}})


# What the recipe gets.


def test_the_recipe_gets_its_environment_and_nothing_else_of_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("RAY_")]:  # an earlier test may have loaded Ray
        monkeypatch.delenv(name)
    for name in ("RAY_ADDRESS", "RAY_STATED", "RAY_KEPT", "E2E_REGISTRY_RUN_DIR"):
        monkeypatch.setenv(name, "inherited")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "RAY_STATED": "otherwise", "RAY_NEW": "1", "NAME": "\udcff€"}
    inherited, _ = os.pipe()
    os.set_inheritable(inherited, True)
    code = """
        import json, os, signal, sys
        print(json.dumps({
            "environment": dict(os.environ), "arguments": sys.argv[1:], "session": os.getsid(0) == os.getpid(),
            "input": sys.stdin.read(), "descriptors": [n for n in os.listdir("/proc/self/fd") if int(n) > 3],
            "ignored": [s for s in ("SIGINT", "SIGHUP", "SIGTERM") if signal.getsignal(getattr(signal, s)) == 1],
            "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        }))
    """
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        outcome = launch(
            spec(
                tmp_path,
                [*python(code), "\udcff€"],
                run_dir=Path("run"),
                environment=environment,
                keep_variables=frozenset({"RAY_KEPT"}),
            )
        )
    finally:
        signal.signal(signal.SIGHUP, old[0])
        signal.pthread_sigmask(signal.SIG_SETMASK, old[1])
        os.close(inherited)
    seen = json.loads(output(outcome))

    assert seen["arguments"] == ["\udcff€"]
    assert (seen["session"], seen["input"], seen["descriptors"]) == (True, "", [])
    assert (seen["ignored"], seen["blocked"]) == ([], 0)
    got = seen["environment"]
    assert got.pop("E2E_REGISTRY_RUN_DIR") == str(tmp_path / "run")
    assert got.pop("E2E_METRICS_JSONL") == str(tmp_path / "run" / "metrics.jsonl")
    assert len(got.pop("E2E_REGISTRY_LAUNCH_ID")) == 32
    assert got.pop("PYTHONUNBUFFERED") == "1"
    assert {name: got[name] for name in got if name.startswith("RAY_")} == {
        "RAY_STATED": "otherwise",
        "RAY_NEW": "1",
        "RAY_KEPT": "inherited",
    }
    dropped = {"RAY_ADDRESS", "E2E_REGISTRY_RUN_DIR"}
    assert got == {name: value for name, value in environment.items() if name not in dropped}


def test_buffering_that_was_stated_stays(tmp_path: Path) -> None:
    stated = spec(tmp_path, ["true"], environment={"PYTHONUNBUFFERED": ""})
    assert child_environment(stated, os.environ)["PYTHONUNBUFFERED"] == ""


# The end of everything that a recipe has started.

#: A recipe whose processes resist: sessions of their own, double forks, a subreaper of their own, SIGTERM ignored,
#: one that is stopped, and one that starts another when it is told to end.
RESISTING = """
    import ctypes, os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    def daemon(work):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.setsid()
                work()
                os.execvp("sleep", ["sleep", "1234"])
            os._exit(0)
        os.wait()
    def subreaper():
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
        daemon(lambda: None)
    def stopped():
        os.kill(os.getpid(), signal.SIGSTOP)
    def respawning():
        def again(*_):
            if os.fork() == 0:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.execvp("sleep", ["sleep", "1234"])
        signal.signal(signal.SIGTERM, again)
        while True:
            time.sleep(0.01)
    daemon(lambda: None)
    daemon(subreaper)
    daemon(stopped)
    daemon(respawning)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    print("ready", flush=True)
    while True:
        time.sleep(1)
"""


@pytest.mark.slow
def test_a_timeout_ends_every_descendant_and_nobody_else(
    tmp_path: Path, marked: Marked, bystander: subprocess.Popen[bytes]
) -> None:
    seen: list[int] = []
    outcome = launch(
        spec(tmp_path, python(RESISTING), environment=marked.environment, timeout_s=10.0, grace_s=0.5),
        on_line=lambda _: seen.extend(marked.pids()),
    )
    assert marked.pids() == []
    assert len(seen) >= 4  # they did exist
    assert (outcome.status, outcome.signal, outcome.is_success) == ("timeout", signal.SIGKILL, False)
    assert outcome.explanation == "exceeded its timeout of 10 s"
    assert run_json(tmp_path)["outcome"]["status"] == "timeout"


@pytest.mark.parametrize("meanwhile", ["while :; do sleep 0.05; done", "kill -STOP $$"], ids=["running", "stopped"])
def test_a_recipe_is_given_time_to_end_by_itself(tmp_path: Path, meanwhile: str) -> None:
    script = f"trap 'echo farewell; exit 3' TERM; echo ready; {meanwhile}"
    outcome = launch(spec(tmp_path, ["sh", "-c", script], timeout_s=3.0, grace_s=60))
    assert (outcome.status, outcome.exit_code, outcome.signal) == ("timeout", 3, None)
    assert output_lines(tmp_path) == ["ready", "farewell"]


def test_what_forks_faster_than_it_can_be_found_does_not_escape(tmp_path: Path, marked: Marked) -> None:
    # Each generation lives for about a millisecond, in a session of its own, and is an orphan at once.
    comet = STUBBORN + "print('ready', flush=True)\nwhile True:\n    if os.fork(): os._exit(0)\n    os.setsid()\n"
    command = python(STUBBORN + f"for _ in range(3):\n    if os.fork() == 0: exec({comet!r})\ntime.sleep(1234)")
    outcome = launch(spec(tmp_path, command, environment=marked.environment, timeout_s=5.0, grace_s=0.2))
    assert output(outcome) == b"ready\n" * 3
    assert marked.pids() == []


def test_it_is_caught_even_where_proc_takes_too_long_to_read(marked: Marked) -> None:
    code = f"""
        import os, signal, sys
        sys.path.append({str(ROOT)!r})
        from e2e_registry.execution import processes
        processes.become_subreaper()
        if os.fork() == 0:
            while True:
                if os.fork(): os._exit(0)
                os.setsid()
        def kill():
            processes.kill_children()
            return processes.reap()[1]
        ending = processes.Ending(lambda: [], grace_s=0.1, kill_faster=kill)
        while processes.reap()[1]:
            ending.step()
    """
    assert subprocess.run(python(code), env=marked.environment, check=False, timeout=180).returncode == 0
    assert marked.pids() == []


def test_a_child_left_behind_is_ended_and_reported(
    tmp_path: Path, marked: Marked, bystander: subprocess.Popen[bytes]
) -> None:
    script = "setsid sleep 1234 & (sleep 1234 >/dev/null 2>&1 &) ; sleep 0.1 & echo done"
    outcome = launch(spec(tmp_path, ["sh", "-c", script], environment=marked.environment, settle_s=3.0))
    assert outcome.is_success
    assert [child.command for child in outcome.left_behind] == ["sleep 1234", "sleep 1234"]
    assert [child["command"] for child in run_json(tmp_path)["outcome"]["left_behind"]] == ["sleep 1234"] * 2
    assert marked.pids() == []
    assert output(outcome) == b"done\n"


def test_a_list_of_what_was_left_behind_is_bounded(tmp_path: Path, marked: Marked) -> None:
    script = f"for i in $(seq 30); do sleep 1234 {'0 ' * 2500} & done"
    outcome = launch(spec(tmp_path, ["sh", "-c", script], environment=marked.environment, settle_s=3.0))
    assert len(outcome.left_behind) == 20
    assert {(len(child.command), child.command[-2:]) for child in outcome.left_behind} == {(200, " …")}
    assert marked.pids() == []


def test_output_that_somebody_outside_holds_open_is_not_awaited(tmp_path: Path) -> None:
    holders: list[Any] = []

    def hold(line: str) -> None:
        holders.append(open(f"/proc/{line}/fd/1", "wb", buffering=0))  # noqa: SIM115 (closed below)
        (tmp_path / "held").touch()

    script = "echo $$; until [ -e held ]; do sleep 0.05; done; echo end"
    outcome = launch(spec(tmp_path, ["sh", "-c", script]), on_line=lambda line: holders or hold(line))
    assert holders
    holders[0].close()
    assert output(outcome).endswith(b"end\n")


# The end of those who watch.

DRIVER = """
    import json, os, signal, sys, time
    from pathlib import Path
    sys.path.insert(0, {root!r})
    from e2e_registry.execution.launcher import LaunchSpec, launch
    options = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    forks = options.pop("forks")
    def heard(line):
        if line == "ready":
            if forks and os.fork() == 0:  # with every descriptor of the launcher, as multiprocessing makes children
                time.sleep(1234)
            print(line, flush=True)
    for name in ("cwd", "run_dir"):
        options[name] = Path(options[name])
    launch(LaunchSpec(**options), on_line=heard)
"""


def start_launcher(
    tmp_path: Path,
    marked: Marked,
    command: list[str],
    *,
    interpreter: Sequence[str] = (sys.executable,),
    forks: bool = False,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Launch from a process of its own, and return it when the recipe has printed a line."""
    given = {"cwd": str(tmp_path), "run_dir": str(tmp_path / "run"), "timeout_s": 60.0, "grace_s": 0.3, "forks": forks}
    text = json.dumps({"command": command, "environment": marked.environment, **given, **options})
    driver = [*interpreter, "-c", textwrap.dedent(DRIVER).format(root=str(ROOT)), text]
    process = subprocess.Popen(driver, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def watchers(launcher: subprocess.Popen[bytes]) -> dict[str, int]:
    """Return the pids of the launcher and its two helpers."""
    is_guard = {
        pid: b"/execution/supervisor.py\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
        for pid in children(launcher.pid)
    }
    (guard,) = (pid for pid in is_guard if is_guard[pid])
    (supervisor,) = children(guard)
    return {"launcher": launcher.pid, "guard": guard, "supervisor": supervisor}


@pytest.mark.parametrize("forks", [False, True], ids=["alone", "with a child that holds its descriptors"])
def test_the_recipe_dies_with_the_launcher(
    tmp_path: Path, marked: Marked, bystander: subprocess.Popen[bytes], forks: bool
) -> None:
    chatty = RESISTING.replace("time.sleep(1)", "print('x' * 100000)")  # so that there is output nobody takes
    launcher = start_launcher(tmp_path, marked, python(chatty), forks=forks)
    pids = watchers(launcher)
    clones = eventually(lambda: set(children(launcher.pid)) - {pids["guard"]}) if forks else set()
    assert len(marked.pids()) >= 4
    launcher.kill()
    launcher.wait()
    eventually(lambda: not marked.pids())
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids.values()))
    assert run_json(tmp_path)["outcome"] is None  # a reader says: incomplete
    for clone in clones:
        os.kill(clone, signal.SIGKILL)


@pytest.mark.parametrize(
    ("victims", "explanation"),
    [
        (["supervisor"], "interrupted: its supervisor process was killed by SIGKILL"),
        (["guard"], "interrupted: its guard process was killed"),
        (["guard", "supervisor"], "interrupted: its supervisor and its guard were killed"),
        (["launcher", "supervisor"], None),
        (["launcher", "guard"], None),
    ],
    ids=["supervisor", "guard", "both", "launcher and supervisor", "launcher and guard"],
)
def test_the_recipe_dies_with_those_who_watch_it(
    tmp_path: Path, marked: Marked, bystander: subprocess.Popen[bytes], victims: list[str], explanation: str | None
) -> None:
    launcher = start_launcher(tmp_path, marked, python(RESISTING))
    pids = watchers(launcher)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # so that none is left to see another's end
        for victim in victims:
            os.kill(pids[victim], number)
    eventually(lambda: not marked.pids())
    launcher.wait()
    assert (tmp_path / "run" / "output.log").read_text() == "ready\n"
    outcome = run_json(tmp_path)["outcome"]
    assert (outcome and outcome["explanation"]) == explanation
    assert explanation is None or outcome["status"] == "interrupted"


def test_the_kernel_kills_the_recipe_if_nobody_else_is_left_to_do_it(tmp_path: Path, marked: Marked) -> None:
    launcher = start_launcher(tmp_path, marked, python(STUBBORN + "print('ready', flush=True)\ntime.sleep(1234)"))
    for pid in watchers(launcher).values():
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not marked.pids())
    launcher.wait()


def test_last_words_after_the_supervisor_was_killed_are_in_the_log(tmp_path: Path, marked: Marked) -> None:
    script = "sh -c 'trap \"echo farewell; exit\" TERM; echo ready; while :; do sleep 0.05; done'; true"
    launcher = start_launcher(tmp_path, marked, ["sh", "-c", script], grace_s=60)
    os.kill(watchers(launcher)["supervisor"], signal.SIGKILL)
    assert launcher.wait() == 0
    assert output_lines(tmp_path) == ["ready", "farewell"]


@pytest.fixture
def another_user() -> Iterator[tuple[list[str], str]]:
    """A Python of an ordinary user, and a program with which that user can become root."""
    setpriv = shutil.which("setpriv")
    if os.getuid() != 0 or setpriv is None:
        pytest.skip("needs root and setpriv, to start a process that the launcher's user may not signal")
    ordinary = [setpriv, "--reuid=65534", "--regid=0", "--clear-groups"]
    probe = f"import subprocess, sys; sys.path.insert(0, {str(ROOT)!r}); import e2e_registry.execution.launcher"
    probe += "; subprocess.run([sys.executable, '-c', ''], check=True)"
    pythons = [python for python in (sys.executable, "/usr/bin/python3") if os.path.exists(python)]
    usable = [p for p in pythons if subprocess.run([*ordinary, p, "-c", probe], capture_output=True).returncode == 0]
    if not usable:
        pytest.skip("needs a Python that other users can run")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o770)  # for root's group alone, since what follows is a way to become root
    shutil.copy(setpriv, folder / "become")
    os.chmod(folder / "become", 0o4750)
    becoming = [*ordinary, str(folder / "become"), "--reuid=0", "id", "-u"]
    became = subprocess.run(becoming, capture_output=True, text=True, check=False)
    if became.stdout != "0\n":
        shutil.rmtree(folder)
        pytest.skip("needs a folder for temporary files where set-user-ID programs have an effect")
    yield [*ordinary, usable[0]], str(folder / "become")
    shutil.rmtree(folder)


@pytest.mark.slow
def test_what_may_not_be_signalled_is_named_and_not_awaited_for_ever(
    marked: Marked, another_user: tuple[list[str], str]
) -> None:
    ordinary_python, become = another_user
    folder = Path(become).parent
    is_another = "grep -q '^Uid:.0' /proc/$!/status"
    script = f"{become} --reuid=0 sleep 1234 & until {is_another}; do :; done; sleep 1234 & echo ready; wait"
    launcher = start_launcher(folder, marked, ["sh", "-c", script], interpreter=ordinary_python, timeout_s=4)
    assert launcher.wait() == 0
    (survivor,) = marked.pids()
    outcome = run_json(folder)["outcome"]
    assert outcome["status"] == "timeout"
    assert outcome["left_behind"] == [{"pid": survivor, "command": "sleep 1234", "has_survived": True}]


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_ends_the_recipe_first(
    tmp_path: Path, marked: Marked, bystander: subprocess.Popen[bytes], number: signal.Signals, exit_code: int
) -> None:
    launcher = start_launcher(tmp_path, marked, python(RESISTING))
    launcher.send_signal(number)
    assert launcher.wait() == exit_code  # KeyboardInterrupt and SystemExit have passed through
    assert marked.pids() == []
    assert run_json(tmp_path)["outcome"]["explanation"] == "interrupted"


def test_a_second_interrupt_shortens_the_grace_period_and_a_third_leaves(tmp_path: Path, marked: Marked) -> None:
    code = """
        import os, signal, time
        signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"told\\n"))
        print("ready", flush=True)
        time.sleep(1234)
    """
    launcher = start_launcher(tmp_path, marked, python(code), grace_s=1e6)
    launcher.send_signal(signal.SIGINT)
    eventually(lambda: "told" in output_lines(tmp_path))
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait() == -signal.SIGINT
    assert marked.pids() == []
    assert run_json(tmp_path)["outcome"]["signal"] == signal.SIGKILL


def test_an_error_in_a_callback_ends_the_run(tmp_path: Path, marked: Marked) -> None:
    def fail(line: str) -> None:
        time.sleep(1)  # by now everything between here and there is full
        raise LookupError(line)

    chatty = """
        import os, signal
        signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"\\nfarewell\\n"), os._exit(0)))
        os.write(1, b"ready\\n")
        while True:
            os.write(1, b"x" * 100000)
    """
    with pytest.raises(LookupError, match="ready"):
        launch(spec(tmp_path, python(chatty), environment=marked.environment, grace_s=1e6), on_line=fail)
    assert marked.pids() == []
    outcome = run_json(tmp_path)["outcome"]
    assert (outcome["status"], outcome["exit_code"]) == ("interrupted", 0)
    assert log_tail(tmp_path / "run" / "output.log", lines=1) == "farewell"


def test_a_callback_that_hangs_does_not_stop_the_clock(tmp_path: Path, marked: Marked) -> None:
    taken: list[str] = []

    def hang(line: str) -> None:
        taken.append(line)
        if len(taken) == 1:
            eventually(lambda: not marked.pids())

    script = "while :; do echo 0123456789; done"
    outcome = launch(spec(tmp_path, ["sh", "-c", script], environment=marked.environment, timeout_s=1), on_line=hang)
    assert outcome.status == "timeout"


# Several launches in one process, which has children of its own.


def test_launches_in_threads_keep_to_themselves(tmp_path: Path, marked: Marked) -> None:
    is_subreaper = ctypes.c_int()
    own = subprocess.Popen(["sh", "-c", "sleep 0.2; exit 5"])
    cancellation = Cancellation()

    def attempt(number: int) -> Outcome:
        if number % 3 == 0:
            command, options = ["sh", "-c", f"echo {number}; exit {number}"], {}
        elif number % 3 == 1:
            command, options = python(RESISTING), {"timeout_s": 1.5, "grace_s": 0.1}
        else:
            command, options = ["sleep", "1234"], {}
        return launch(
            spec(tmp_path, command, run_dir=tmp_path / str(number), environment=marked.environment, **options),
            cancellation=cancellation if number % 3 == 2 else None,
        )

    with ThreadPoolExecutor(9) as pool:
        running = [pool.submit(attempt, number) for number in range(9)]
        eventually(lambda: len(marked.pids(containing="sleep\x001234")) >= 3)
        ctypes.CDLL(None).prctl(37, ctypes.byref(is_subreaper), 0, 0, 0)
        cancellation.cancel()
        outcomes = [future.result() for future in running]
    assert [outcome.status for outcome in outcomes] == ["exited", "timeout", "interrupted"] * 3
    assert [outcomes[n].exit_code for n in (0, 3, 6)] == [0, 3, 6]
    assert output(outcomes[6]) == b"6\n"
    assert marked.pids() == []
    assert own.wait() == 5  # nobody has reaped it
    assert is_subreaper.value == 0  # nor will an orphan of somebody else come here

    late = launch(spec(tmp_path, ["sleep", "1234"], environment=marked.environment), cancellation=cancellation)
    assert late.status == "interrupted"


# Output.


@settings(max_examples=150)
@given(data=st.data())
def test_a_log_holds_the_first_and_the_last_of_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    limit = 4096
    sizes = data.draw(st.lists(st.one_of(st.integers(0, 300), st.integers(0, 9000)), max_size=12))
    stream = secrets.token_bytes(sum(sizes))
    path = tmp_path_factory.mktemp("log") / "output.log"
    log = CappedLog(os.fsencode(path), limit)
    at = 0
    for size in sizes:
        log.write(memoryview(stream[at : at + size]))
        at += size
        assert path.stat().st_size <= limit
        assert path.read_bytes()[: limit // 2] == stream[:at][: limit // 2]
        if at <= limit - 128:
            assert path.read_bytes() == stream[:at]
    log.finish()
    kept = path.read_bytes()
    assert log.total == len(stream)
    assert len(kept) <= limit
    if log.dropped:
        head, marker, tail = kept[: limit // 2], kept[limit // 2 :].split(b"\n", 2)[1], kept[-(limit // 2 - 128) :]
        assert head == stream[: limit // 2]
        assert marker.startswith(b"[%d bytes of output left out" % log.dropped)
        assert tail == stream[-(limit // 2 - 128) :]
        assert len(head) + log.dropped + len(tail) == len(stream)
    else:
        assert kept == stream


def count_lines(megabytes: int) -> list[str]:
    """Return a command that prints numbered lines of 100 bytes."""
    return python(f"""
        import sys
        for block in range({megabytes}):
            sys.stdout.write("".join(f"{{block * 10000 + i:099d}}\\n" for i in range(10000)))
    """)


def test_a_long_output_costs_its_limit(tmp_path: Path) -> None:
    outcome = launch(spec(tmp_path, count_lines(100), log_limit=2**20))
    kept = output(outcome)
    assert (outcome.log_bytes, outcome.is_success) == (100 * 10**6, True)
    assert 2**20 - 128 <= len(kept) <= 2**20
    assert outcome.log_dropped == 100 * 10**6 - 2**20 + 128
    assert kept.startswith(b"%099d\n%099d\n" % (0, 1))
    assert kept.endswith(b"%099d\n%099d\n" % (999998, 999999))
    assert log_tail(outcome.log_path, lines=2) == f"{999998:099d}\n{999999:099d}"


@pytest.mark.slow
def test_a_gigabyte_passes_in_bounded_memory(tmp_path: Path) -> None:
    peaks: list[int] = []

    def watch() -> None:
        while not (tmp_path / "run" / "done").exists():
            for guard in children(os.getpid()):
                for pid in (guard, *children(guard)):
                    status = Path(f"/proc/{pid}/status").read_text() if os.path.exists(f"/proc/{pid}") else ""
                    peaks.extend(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    outcome = launch(spec(tmp_path, ["sh", "-c", "yes 0123456789 | head -c 1000000000"]))
    (tmp_path / "run" / "done").touch()
    watcher.join()
    assert (outcome.log_bytes, outcome.is_success) == (10**9, True)
    assert outcome.log_path.stat().st_size <= 16 * 2**20
    assert max(peaks) < 64 * 1024  # KiB: Python, the newest 8 MiB, and one read


FLOOD = """
    import sys, time
    print("ready", flush=True)
    for i in range(200000):
        print("line", i)
    print("the last words", flush=True)
    time.sleep(1234)
"""


@pytest.mark.parametrize("victim", [None, "supervisor"])
def test_a_log_is_of_use_while_the_run_goes_on_and_if_the_supervisor_was_killed(
    tmp_path: Path, marked: Marked, victim: str | None
) -> None:
    log = tmp_path / "run" / "output.log"
    launcher = start_launcher(tmp_path, marked, python(FLOOD), log_limit=2**16)
    eventually(lambda: log_tail(log, lines=1) == "the last words")
    if victim:
        os.kill(watchers(launcher)[victim], signal.SIGKILL)
        launcher.wait()
    assert log.stat().st_size <= 2**16
    assert log.read_text().startswith("ready\nline 0\nline 1\n")
    assert log.read_text().endswith("\nline 199999\nthe last words\n")
    assert "bytes of output left out here" in log.read_text()
    launcher.terminate()
    launcher.wait()


def test_every_line_is_passed_on_however_slow_the_callback(tmp_path: Path) -> None:
    lines: list[str] = []

    def take(line: str) -> None:
        lines.append(line)
        if len(lines) % 20000 == 0:
            time.sleep(0.05)

    outcome = launch(spec(tmp_path, count_lines(20), log_limit=2**16), on_line=take)
    assert outcome.is_success
    assert [int(line) for line in lines] == list(range(200000))


def test_lines_are_text_whatever_was_printed(tmp_path: Path) -> None:
    lines: list[str] = []
    printed = r"caf\303\251 \377\n\r\nwindows\r\n\nno end"
    outcome = launch(spec(tmp_path, ["sh", "-c", f"printf '{printed}'"]), on_line=lines.append)
    assert lines == ["café \ufffd", "", "windows", "", "no end"]
    assert output(outcome) == b"caf\xc3\xa9 \xff\n\r\nwindows\r\n\nno end"
    lines.clear()
    launch(spec(tmp_path, ["head", "-c", "200000", "/dev/zero"], run_dir=tmp_path / "2"), on_line=lines.append)
    assert "".join(lines) == "\0" * 200000
    assert max(map(len, lines)) <= 2**16


@pytest.mark.parametrize(
    ("log", "tail"),
    [
        (b"", ""),
        (b"one\ntwo\nthree\n", "two\nthree"),
        (b"one\ntwo", "one\ntwo"),
        (b"\xff\xfe\n", "\ufffd\ufffd"),
        (b"\x1b[31mred\x1b[0m \x1b]0;title\x07end\x1b[2J\n", "red end"),
        (b"bell\x07 nul\0 \xe2\x80\xaebidi\tand a tab\n", "bell\\x07 nul\\x00 \\u202ebidi\tand a tab"),
        (b"  0%\r 50%\r100%\r\nwindows\r\n", "100%\nwindows"),
        (b"x" * 100 + b"\xc3\xa9" * 30 + b"\n", "…" + "é" * 29),
    ],
)
def test_the_tail_of_a_log_is_text_that_steers_no_terminal(tmp_path: Path, log: bytes, tail: str) -> None:
    (tmp_path / "output.log").write_bytes(log)
    assert log_tail(tmp_path / "output.log", lines=2, max_bytes=60) == tail


def test_the_tail_of_a_log_that_is_not_there(tmp_path: Path) -> None:
    assert log_tail(tmp_path / "output.log") == ""
    with pytest.raises(StorageError):
        log_tail(tmp_path)
