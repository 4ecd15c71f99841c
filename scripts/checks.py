#!/usr/bin/env python3
"""Runs the checks of a change, or of a night, and prints the time of each step.

  checks.py day           what a change must pass: `make test`
  checks.py night [FROM]  what takes longer: `make nightly`. Steps that have passed on this code are
                          not run again. With the name of a step, only it and later ones are run.
  checks.py slowest       the slowest steps and tests of the last `day` in this clone

Steps run in lanes, side by side. The main lane compiles and tests. The side lane installs, lints,
or uses one core where the main lane uses the other. The rest lane compiles what is needed late, and
takes what the others leave.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "target" / "checks"
STEP_TIMES, TEST_TIMES = RESULTS / "steps.tsv", RESULTS / "tests.tsv"
# What has passed at night, by the code that passed. It outlives the clone.
NIGHTS = pathlib.Path("/var/tmp/fencepost-nights")
MAX_NIGHTS = 5
PAGE = ROOT / "docs" / "proof.md"
TABLE_BEGINS, TABLE_ENDS = "<!-- night begins -->\n", "<!-- night ends -->\n"

# Machines differ by a factor of two, so a slow run is reported and does not fail.
WARN_ABOVE_SECONDS = 36 * 60
SHOWN_SLOWEST = 20
# The least share of the processors that a process can ask for.
MOST_NICE = 19
# The pause between two looks at running steps.
LOOK_SECONDS = 0.1

# Clippy's driver also compiles: lints and code come from one pass of the compiler. It is named on
# the command line, since tests compile programs of users, which must not inherit it.
TEST = 'cargo test --config build.rustc-workspace-wrapper=\\"clippy-driver\\" --locked --workspace'
LINTS = {"CLIPPY_ARGS": "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__"}
# A failed assertion names its line; a backtrace would push what it says out of short logs.
TERSE = {"RUST_BACKTRACE": "0"}
# Many tests wait, so two cores have time for three.
IT = f"{TEST} --test it -- --test-threads 3"
# Tests of what the statements do, by the beginnings of their names.
STORE_TESTS = ["acks", "batches", "conditions", "control", "dead_letters", "dependencies", "jobs",
               "limited_claims", "lists", "model", "operations", "plans", "recurring", "roles",
               "running_counts", "search", "statements", "storage", "webhooks"]
INTERLEAVINGS = f"{TEST} --test coalescer --test pump --test relay --test wakeups"
CHAOS = "target/debug/fencepost-chaos"
# A release without its slowest optimisation.
RELEASE = {"CARGO_PROFILE_RELEASE_LTO": "off", "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "32"}
BENCH = "target/release/fencepost-bench --without-comparison --seconds 6"


@dataclasses.dataclass
class Step:
    """A command of the shell."""

    name: str
    command: str
    # It runs once these have passed, and not at all if one has failed.
    after: tuple = ()
    lane: str = "main"
    env: dict = dataclasses.field(default_factory=dict)
    # What the table of the night says. Steps without it prepare others, and run each time.
    about: str = ""
    # It runs once these have ended: both need the same files, or all of the machine.
    apart_from: tuple = ()
    # It takes only what other steps leave of the processors.
    yields: bool = False


PREPARE = [
    Step("install", "sh scripts/setup.sh test", lane="side"),
    Step("format", "cargo fmt --all --check"),
    Step("restore", "python3 scripts/dependencies.py restore"),
    Step("build", f"{TEST} --no-run", ("restore",)),
    Step("keep", "python3 scripts/dependencies.py keep", ("build",), "side"),
]

DAY = PREPARE + [
    Step("openapi", "sh scripts/lint_openapi.sh", ("install",), "side"),
    Step("deny", "sh scripts/deny.sh", ("install",), "side"),
    Step("browser", "sh scripts/e2e.sh install", ("install",), "side"),
    Step("unit", f"{TEST} --lib --bins --examples", ("build",)),
    Step("interleavings", INTERLEAVINGS, ("build",)),
    Step("model", f"{TEST} --test lease --test order", ("build",)),
    Step("doctests", f"{TEST} --doc", ("build",)),
    Step("it", IT, ("build", "install", "deny", "openapi")),
    Step("chaos", f"{TEST} --test run", ("build", "install")),
    Step("e2e", "sh scripts/e2e.sh", ("build", "browser")),
]

NIGHT = PREPARE + [
    Step("install-chaos", "sh scripts/setup.sh chaos", ("install",), "side"),
    Step("model", f"{TEST} --test lease --test order -- --test-threads 1", ("build",), "side",
         {"FENCEPOST_MODEL_FULL": "1"},
         "the lease protocol and the order of groups in every order of events"),
    Step("interleavings", INTERLEAVINGS, ("build",), env={"FENCEPOST_ORDERS": "50000"},
         about="the server's tasks in 50,000 random orders of each test"),
    Step("long-tests", f"{IT} --ignored", ("build", "install"),
         about="newcomers in five languages, generated clients, libraries that lose answers, "
         "a silent database"),
    Step("histories", f"{IT} model::whatever_happens groups::histories", ("build",),
         env={"FENCEPOST_MODEL_SEEDS": "80", "FENCEPOST_MODEL_FIRST_SEED": "@day"},
         about="80 new random histories of jobs, and 160 of groups, beside their models"),
    Step("deadlocks", f"{IT} never_deadlock", ("build",),
         env={"FENCEPOST_DEADLOCK_SECONDS": "300"},
         about="operations on the same rows, for 300 s"),
    Step("soak", f"{IT} nodes_that_are_killed_at_random", ("build",),
         env={"FENCEPOST_DUEL_SECONDS": "60", "FENCEPOST_DUEL_ROUNDS": "5"},
         about="schedules of every second on nodes that are killed, 5 rounds of 60 s"),
    Step("order", f"{IT} groups_keep_their_order", ("build",),
         env={"FENCEPOST_ORDER_GROUPS": "2000", "FENCEPOST_ORDER_JOBS": "20"},
         about="40,000 jobs of 2,000 groups in their order, on nodes that are killed"),
    Step("chaos", f"for seed in 1 2 3; do {CHAOS} run --seed $seed --seconds 60 || exit 1; done; "
         f"{CHAOS} run --seconds 60 && {CHAOS} run --seconds 60",
         ("build", "install-chaos"), apart_from=("model",),
         about="clients and faults, with three fixed seeds and two new ones, 60 s each"),
    Step("mutants", f"sh scripts/planted.sh && "
         f"{CHAOS} mutants --program target/planted/fencepost --results docs/proof.jsonl && "
         f"{CHAOS} page --results docs/proof.jsonl --page docs/proof.md",
         ("build", "install-chaos"), apart_from=("model",), about="every planted bug is caught"),
    Step("last-release", "sh scripts/upgrade.sh build", ("restore",), "rest", yields=True),
    Step("upgrade", "sh scripts/upgrade.sh", ("build", "install-chaos", "last-release"),
         about="nodes of each earlier release and of this code on one database, 120 s of faults"),
    Step("rehearsal", "sh scripts/rehearsal.sh", ("build", "install-chaos"), apart_from=("model",),
         about="the leader of PostgreSQL under Patroni is killed: no accepted job is lost"),
    Step("postgres-18", f'PATH="$(sh scripts/postgres18.sh):$PATH" {IT} {" ".join(STORE_TESTS)}',
         ("build", "install"), about="tests of the store on PostgreSQL 18"),
    Step("e2e", "sh scripts/e2e.sh", ("build", "install"), env={"FENCEPOST_E2E_ALL": "1"},
         apart_from=("model",), about="the console in a browser, in two themes and three widths"),
    # These two may build the server again, for other features of its dependencies.
    Step("clients", "sh scripts/setup.sh clients && bash scripts/clients.sh", ("install",),
         apart_from=("chaos", "mutants", "upgrade", "e2e"),
         about="clients of six generators work a job each"),
    Step("fuzz", "sh scripts/fuzz.sh", ("install",),
         apart_from=("chaos", "mutants", "upgrade", "e2e"),
         about="20,000 valid and invalid requests made from the OpenAPI file"),
    Step("documentation", "cargo doc --locked --workspace --no-deps --document-private-items",
         ("restore",), env={"RUSTDOCFLAGS": "-D warnings"},
         about="the API reference of all crates, without warnings"),
    Step("lints", "cargo clippy --locked --profile quick -p fencepost -- -D warnings",
         ("restore",), "rest", yields=True,
         about="the server as it is released, without assertions and fail points"),
    Step("release", "cargo build --locked --release -p fencepost -p fencepost-bench", ("restore",),
         "rest", env=RELEASE, yields=True),
    # Databases in memory would slow the measurements down.
    Step("clean", "make --no-print-directory clean-test", ("release",),
         apart_from=("long-tests", "histories", "deadlocks", "soak", "upgrade", "postgres-18",
                     "mutants", "e2e", "clients", "fuzz", "documentation", "lints")),
    Step("isolation", f"{BENCH} --isolation", ("clean",),
         about="eleven attacks by another tenant stay within the bound"),
    Step("abuse", f"{BENCH} --abuse", ("clean",),
         about="nineteen attacks by a stranger, and a control, stay within the bound"),
]


class Run:
    """Steps in their lanes, until all have ended or one has failed."""

    def __init__(self, steps, stops_at_failure):
        self.waiting = list(steps)
        self.names = {step.name for step in steps}
        self.stops_at_failure = stops_at_failure
        self.running = {}
        self.ended = set()
        # Steps that failed, or were not run since an earlier one failed.
        self.failed = set()

    def results(self):
        """Each step as it ends, with whether it passed and its seconds."""
        try:
            yield from self.ends()
        finally:
            self.stop()

    def ends(self):
        while self.waiting or self.running:
            for step in [step for step in self.waiting if self.may_start(step)]:
                if step.lane not in self.running:
                    self.waiting.remove(step)
                    self.running[step.lane] = (step, start(step), time.monotonic())
            for lane, (step, process, since) in list(self.running.items()):
                if process.poll() is None:
                    continue
                del self.running[lane]
                self.ended.add(step.name)
                has_passed = process.returncode == 0
                show_end(step, has_passed)
                if not has_passed:
                    self.drop_those_after(step)
                yield step, has_passed, time.monotonic() - since
                if not has_passed and self.stops_at_failure:
                    return
            time.sleep(LOOK_SECONDS)

    def may_start(self, step):
        awaited = self.names.intersection(step.after + step.apart_from)
        return awaited <= self.ended | self.failed

    def drop_those_after(self, failed):
        self.failed.add(failed.name)
        # One pass is enough: steps are listed after those that they come after.
        for step in list(self.waiting):
            if self.failed.intersection(step.after):
                say(f"{step.name} is not run, since {failed.name} failed")
                self.waiting.remove(step)
                self.failed.add(step.name)

    def stop(self):
        for _, process, _ in self.running.values():
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
        self.running.clear()


def log_of(step):
    return RESULTS / f"{step.name}.log"


def start(step):
    say(f"{step.name}: {step.command}")
    own = {name: today() if value == "@day" else value for name, value in step.env.items()}
    env = {**os.environ, **LINTS, **TERSE, **own}
    # Only the main lane writes to the terminal: two at once cannot be read.
    out = None if step.lane == "main" else log_of(step).open("w")
    return subprocess.Popen(
        step.command, shell=True, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out,
        stderr=out and subprocess.STDOUT, start_new_session=True,
        preexec_fn=yield_to_others if step.yields else None,
    )


def yield_to_others():
    """Where Linux groups processes by their sessions, a group has a value of its own, and `nice`
    counts only within it."""
    os.nice(MOST_NICE)
    try:
        pathlib.Path("/proc/self/autogroup").write_text(str(MOST_NICE))
    except OSError:
        pass


def show_end(step, has_passed):
    lines = log_of(step).read_text(errors="replace").splitlines() if step.lane != "main" else []
    for line in lines[-1:] if has_passed else lines:
        print(line, flush=True)
    if not has_passed:
        say(f"{step.name} FAILED")


def say(text):
    print(f"checks: {text}", flush=True)


def clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def today():
    """The day as a number, which is another seed each night."""
    return datetime.date.today().strftime("%Y%m%d")


def day():
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    os.environ["FENCEPOST_TEST_TIMES"] = str(TEST_TIMES)
    began, rows = time.monotonic(), []
    try:
        for step, has_passed, seconds in Run(DAY, stops_at_failure=True).results():
            rows.append((step.name, has_passed, seconds))
            with STEP_TIMES.open("a") as file:
                file.write(f"{seconds:.1f}\t{step.name}\n")
    finally:
        delete_databases()
    took, is_good = time.monotonic() - began, all(row[1] for row in rows)
    for name, has_passed, seconds in rows:
        say(f"{clock(seconds):>6}  {name}{'' if has_passed else '  FAILED'}")
    say(f"{clock(took):>6}  in all: {'passed' if is_good else 'FAILED'}")
    if took > WARN_ABOVE_SECONDS:
        say(f"WARNING: more than {WARN_ABOVE_SECONDS // 60} minutes; `make slowest` shows where")
    return is_good


def delete_databases():
    """They are in memory, which nothing else frees."""
    subprocess.run(["make", "--no-print-directory", "clean-test"], cwd=ROOT, check=False)


def slowest():
    if not TEST_TIMES.exists():
        sys.exit("no tests ran here: run `make test` first")
    for file, what in ((STEP_TIMES, "step"), (TEST_TIMES, "test of `it`")):
        rows = [line.split("\t") for line in file.read_text().splitlines()]
        rows.sort(key=lambda row: -float(row[0]))
        print(f"| {what} | seconds |\n|---|---:|")
        for seconds, name in rows[:SHOWN_SLOWEST]:
            print(f"| {name} | {float(seconds):.0f} |")
        print()
    return True


def git(*arguments):
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def code():
    """A name for the code of this clone, whatever its documents say."""
    tracked = [line for line in git("ls-tree", "-r", "HEAD").splitlines() if is_code(line)]
    changed = git("diff", "HEAD", "--", ".", ":!docs", ":!*.md")
    others = git("ls-files", "--others", "--exclude-standard").splitlines()
    new = [git("hash-object", path) + path for path in others if is_code("\t" + path)]
    text = "\n".join(tracked + new) + changed
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_code(line):
    path = line.partition("\t")[2]
    return not path.startswith("docs/") and not path.endswith(".md")


def night(first=None):
    names = [step.name for step in NIGHT]
    if first is not None and first not in names:
        sys.exit(f"there is no step {first}: {', '.join(names)}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    state = NIGHTS / f"{code()}.json"
    NIGHTS.mkdir(parents=True, exist_ok=True)
    newest_first = sorted(NIGHTS.glob("*.json"), key=lambda file: -file.stat().st_mtime)
    for old in newest_first[MAX_NIGHTS:]:
        old.unlink()
    passed = json.loads(state.read_text()) if state.exists() else {}
    if first is None:
        asked = [step for step in NIGHT if step.about and step.name not in passed]
    else:
        asked = [step for step in NIGHT[names.index(first):] if step.about]
    has_failed = False
    try:
        for step, has_passed, seconds in Run(with_preparation(asked), False).results():
            has_failed = has_failed or not has_passed
            passed.pop(step.name, None)
            if has_passed:
                passed[step.name] = {"seconds": seconds, "day": str(datetime.date.today())}
            part = state.with_suffix(".part")
            part.write_text(json.dumps(passed))
            part.replace(state)
            say(f"{clock(seconds):>6}  {step.name}{'' if has_passed else '  FAILED'}")
    finally:
        delete_databases()
        write_table(passed)
    return not has_failed


def with_preparation(steps):
    """These steps, and those that they come after, in the order of the night."""
    needed, names = {step.name for step in steps}, set()
    while needed != names:
        names = set(needed)
        needed.update(name for step in NIGHT if step.name in names for name in step.after)
    return [step for step in NIGHT if step.name in needed]


def code_is_committed():
    changed = git("status", "--porcelain").splitlines()
    return not any(is_code("\t" + line[3:]) for line in changed)


def write_table(passed):
    """Prints the table of the night, and writes it into the page."""
    commit = git("rev-parse", "--short", "HEAD").strip()
    commit += "" if code_is_committed() else ", with changes"
    rows = [f"| step at {commit} | what it does | day | min:s |\n", "|---|---|---|---:|\n"]
    total = 0
    for step in NIGHT:
        found = passed.get(step.name)
        if step.about:
            shown = f"{found['day']} | {clock(found['seconds'])}" if found else "not passed | "
            rows.append(f"| `{step.name}` | {step.about} | {shown} |\n")
        total += found["seconds"] if found else 0
    rows.append(f"| all, with the build | | | {clock(total)} |\n")
    print("".join(rows))
    page = PAGE.read_text()
    head, rest = page.split(TABLE_BEGINS)
    tail = rest.split(TABLE_ENDS)[1]
    PAGE.write_text(head + TABLE_BEGINS + "".join(rows) + TABLE_ENDS + tail)


if __name__ == "__main__":
    # Ends the steps, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    match sys.argv[1:]:
        case ["day"]:
            is_good = day()
        case ["night", *first] if len(first) <= 1:
            is_good = night(*first)
        case ["slowest"]:
            is_good = slowest()
        case _:
            sys.exit(__doc__)
    sys.exit(0 if is_good else 1)
