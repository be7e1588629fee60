"""The process for an answer's code, started as a script: it confines itself and then runs the code.

The kernel confines the process, without privileges, containers or other programs:

* Landlock (Linux 5.13) allows it to read the interpreter's libraries, and nothing else. Newer
  versions also refuse TCP, and signals to other processes.
* A seccomp filter refuses new processes and programs, sockets, signals to and limits of other
  processes, locks and attributes of files, objects that outlive the process, and all system calls
  since Linux 5.1, for which programs have a fallback.
* Capabilities are dropped, and resource limits bound processor time, memory and output.

``tests/escapes.py`` has the escapes that each rule refuses. If any of these steps fails, the answer
is not run. The process ends with its parent.

Source: the kernel's documentation of ``landlock``, ``seccomp_filter`` and ``capset``.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import signal
import struct
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# The process reports these bytes to its parent: it is confined; all tests passed.
CONFINED_MARK = b"r"
TESTS_PASSED_MARK = b"p"

# All environment variables of a process; hash seeds are constant, so that scores are reproducible.
VARIABLES = {"PYTHONHASHSEED": "0"}

# Paths that an interpreter reads beside its own library.
SHARED_PATHS = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
)

CREATE_RULESET = 444
ADD_RULE = 445
RESTRICT_SELF = 446
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
TRUNCATE = 1 << 14

# The rights that change files and folders: writing, removing, making, moving and truncating.
CHANGING_RIGHTS = 0x7FF2

WRITABLE_DEVICES = (
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/dev/tty",
    "/dev/ptmx",
)

# Number of access rights of each Landlock version; later versions have 16.
LANDLOCK_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}

ALL_PORTS = 0b11
ALL_SCOPES = 0b11
SIGNAL_SCOPE = 0b10
TRUNCATION_VERSION = 3
PORTS_VERSION = 4
SCOPES_VERSION = 6

ALL_CAPABILITIES = 2**64 - 1

# SYS_PTRACE, SYS_ADMIN and PERFMON, with which root reads the variables of any process.
SPYING_CAPABILITIES = 1 << 19 | 1 << 21 | 1 << 38

SET_DEATH_SIGNAL = 1
SET_SECCOMP = 22
FILTER = 2
NO_NEW_PRIVILEGES = 38

# From this number on, all processors use the same call numbers; the first call is from Linux 5.1.
FIRST_COMMON_CALL = 424

# Refused system calls by rule, each with its numbers on x86_64 and aarch64.
REFUSED_CALLS = {
    "processes": "fork 57 -  vfork 58 -  execve 59 221  execveat 322 281  setsid 112 157  "
    "setpgid 109 154",
    "signals": "tkill 200 130  rt_sigqueueinfo 129 138  rt_tgsigqueueinfo 297 240",
    "tracing": """
        ptrace 101 117  process_vm_readv 310 270  process_vm_writev 311 271  kcmp 312 272
        perf_event_open 298 241  get_robust_list 274 100
    """,
    "scheduling": """
        setpriority 141 140  ioprio_set 251 30  migrate_pages 256 238  move_pages 279 239
        sched_setparam 142 118  sched_setscheduler 144 119  sched_setaffinity 203 122
        sched_setattr 314 274
    """,
    "sockets": "socket 41 198  connect 42 203  bind 49 200  listen 50 201  accept 43 202  "
    "accept4 288 242",
    "file attributes": """
        truncate 76 45  chmod 90 -  fchmod 91 52  fchmodat 268 53
        chown 92 -  fchown 93 55  lchown 94 -  fchownat 260 54
        utime 132 -  utimes 235 -  futimesat 261 -  utimensat 280 88
        setxattr 188 5  lsetxattr 189 6  fsetxattr 190 7  removexattr 197 14  lremovexattr 198 15
        fremovexattr 199 16
    """,
    "file locks": "flock 73 32",
    "file watches": "inotify_init 253 -  inotify_init1 294 26  fanotify_init 300 262",
    "file handles": "name_to_handle_at 303 264  open_by_handle_at 304 265",
    "shared memory": """
        memfd_create 319 279  shmget 29 194  shmat 30 196  shmctl 31 195
        msgget 68 186  msgsnd 69 189  msgrcv 70 188  msgctl 71 187
        semget 64 190  semop 65 193  semtimedop 220 192  semctl 66 191  mq_open 240 180
        mq_unlink 241 181
    """,
    "keys": "add_key 248 217  request_key 249 218  keyctl 250 219",
    "namespaces": "unshare 272 97  setns 308 268  mount 165 40  umount2 166 39  pivot_root 155 41  "
    "chroot 161 51",
    "disks": "sync 162 81  syncfs 306 267  io_setup 206 0  quotactl 179 60  swapon 167 224  "
    "swapoff 168 225",
    "clocks": "settimeofday 164 170  adjtimex 159 171  clock_settime 227 112  "
    "clock_adjtime 305 266",
    "kernel": """
        bpf 321 280  userfaultfd 323 282  personality 135 92  syslog 103 116  acct 163 89
        reboot 169 142
        init_module 175 105  delete_module 176 106  finit_module 313 273  kexec_load 246 104
        kexec_file_load 320 294  sethostname 170 161  setdomainname 171 162  vhangup 153 58
        iopl 172 -  ioperm 173 -  modify_ldt 154 -
    """,
}

# Numbers of calls whose arguments decide, on x86_64 and aarch64.
CHECKED_CALLS = """
    clone 56 220  kill 62 129  tgkill 234 131  prlimit 302 261  prctl 157 167  openat 257 56
    open 2 -  socketpair 53 199  fcntl 72 25  ioctl 16 29
"""

CLONE_THREAD = 0x10000
SET_FLAGS = 4
O_ASYNC = 0x2000

LOAD = 0x20
EQUAL = 0x15
AT_LEAST = 0x35
HAS_BITS = 0x45
RETURN = 0x06
ALLOW = 0x7FFF0000
KILL = 0x80000000
DENY = 0x50000 | errno.EPERM
UNKNOWN = 0x50000 | errno.ENOSYS

# The value of a check that stands for the process's own id.
OWN_ID = -1


class Check(NamedTuple):
    """Refuses a call unless an argument, by its lower half, passes the test for one of the values.

    With ``is_reversed``, the call is refused if the argument passes.
    """

    call: str
    argument: int
    test: int
    values: tuple[int, ...]
    is_reversed: bool = False


# Rules of the filter that look at a call's arguments.
ARGUMENT_RULES = {
    "threads alone": (Check("clone", 0, HAS_BITS, (CLONE_THREAD,)),),
    "own signals": (Check("kill", 0, EQUAL, (OWN_ID,)), Check("tgkill", 0, EQUAL, (OWN_ID,))),
    "own limits": (Check("prlimit", 0, EQUAL, (0,)),),
    "death signal": (Check("prctl", 0, EQUAL, (SET_DEATH_SIGNAL,), is_reversed=True),),
    "truncation": (
        Check("openat", 2, HAS_BITS, (os.O_TRUNC,), is_reversed=True),
        Check("open", 1, HAS_BITS, (os.O_TRUNC,), is_reversed=True),
    ),
    # bits of all types of sockets but streams
    "stream pairs": (Check("socketpair", 1, HAS_BITS, (0b110,), is_reversed=True),),
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC and F_GETPIPE_SZ
    "fcntl commands": (Check("fcntl", 1, EQUAL, (0, 1, 2, 3, SET_FLAGS, 1030, 1032)),),
    "asynchronous files": (),  # two arguments decide; see ``build_filter``
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX and FIOCLEX
    "ioctl commands": (Check("ioctl", 1, EQUAL, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),),
}

# Landlock's rules: files (version 1), ports of TCP (4), and signals and abstract sockets (6).
LANDLOCK_RULES = ("files", "ports", "scopes")

# The names of all rules but the resource limits.
RULES = (
    *("capabilities", *LANDLOCK_RULES),
    *("foreign calls", "later calls", *REFUSED_CALLS, *ARGUMENT_RULES),
)


class Processor(NamedTuple):
    """A kind of processor: its audit mark, its column in the lists of calls, and ``capset``."""

    mark: int
    column: int
    capset: int


PROCESSORS = {"x86_64": Processor(0xC000003E, 1, 126), "aarch64": Processor(0xC00000B7, 2, 91)}


def read_landlock_version() -> int:
    """Return the version of Landlock, with which commands are isolated; below 1: there is none."""
    if sys.platform != "linux" or platform.machine() not in PROCESSORS:
        return 0
    version: int = ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1)
    return version


def can_confine() -> bool:
    """Whether this system can confine a process: Linux with Landlock, on a supported processor."""
    return read_landlock_version() >= 1


class SandboxRequest(NamedTuple):
    """The arguments of a process, as JSON on its command line; sizes are in bytes.

    ``program`` is an open file with the answer and its tests in JSON, and ``report`` one for the
    marks. The process ends with its ``parent``, unless that is None.
    """

    parent: int | None
    program: int
    report: int
    seconds: int | None
    memory: int
    output: int
    confine: bool


def build_command(request: SandboxRequest) -> list[str]:
    """Return the command of a process, which finds only the interpreter's libraries on its path."""
    return [sys.executable, "-P", "-s", "-B", "-X", "utf8", __file__, json.dumps(request)]


def main(order: SandboxRequest) -> None:
    """Confine this process and run an answer, then its tests."""
    with os.fdopen(order.program, encoding="utf-8") as file:
        program = json.load(file)
    set_limits(order, alone=not order.confine)
    if order.confine:
        confine_process(order.parent)
    os.write(order.report, CONFINED_MARK)
    tests = program["tests"]
    if tests is None:
        os.close(order.report)
    name = "__main__" if tests is None else "answer"
    module = sys.modules[name] = types.ModuleType(name)
    sys.argv = ["answer.py"]
    names = module.__dict__
    exec(compile(program["answer"], "answer.py", "exec"), names)  # noqa: S102 - the purpose of this process
    if tests is not None:
        exec(compile(tests, "tests.py", "exec"), names)  # noqa: S102
        os.write(order.report, TESTS_PASSED_MARK)


def set_limits(order: SandboxRequest, *, alone: bool, without: Collection[str] = ()) -> None:
    """Set resource limits, ``without`` some in tests; ``alone``: the process may start no other."""
    import resource

    bounds = {
        "AS": (order.memory, order.memory),
        "FSIZE": (order.output, order.output),
        "NOFILE": (64, 64),
        "CORE": (0, 0),
        "MEMLOCK": (0, 0),
        "SIGPENDING": (64, 64),
    }
    if order.seconds is not None:
        bounds["CPU"] = (order.seconds, order.seconds + 1)
    if alone:
        bounds["NPROC"] = (0, 0)
    for name, bound in bounds.items():
        number = getattr(resource, f"RLIMIT_{name}", None)
        if number is None or name in without:
            continue
        try:
            resource.setrlimit(number, bound)
        except (OSError, ValueError):  # macOS has no such limits of memory
            if sys.platform == "linux":
                raise


def confine_process(parent: int | None, *, without: Collection[str] = ()) -> None:
    """Drop all rights that an answer does not need, and end with the parent, unless that is None.

    Tests leave out ``RULES``, to show what a rule refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    machine = PROCESSORS[platform.machine()]
    if parent is not None:
        _call_kernel(libc.prctl, SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if parent not in {None, os.getppid()}:
        raise OSError(errno.ESRCH, "the parent process has ended")
    _call_kernel(libc.prctl, NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if "capabilities" not in without:
        _drop_capabilities(libc)
    if not set(LANDLOCK_RULES) <= set(without):
        _restrict_by_landlock(libc, list_readable_paths(), without)
    program = b"".join(build_filter(machine, os.getpid(), without))
    text = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("@HP", len(program) // 8, ctypes.addressof(text))
    _call_kernel(libc.prctl, SET_SECCOMP, FILTER, head, 0, 0)


def _drop_capabilities(libc: Any, dropped: int = ALL_CAPABILITIES) -> None:
    """Give up capabilities, as bits; the call that reads them comes before that which sets them."""
    machine = PROCESSORS[platform.machine()]
    header = struct.pack("=Ii", 0x20080522, 0)
    found = ctypes.create_string_buffer(24)
    _call_kernel(libc.syscall, machine.capset - 1, header, found)
    low = ~dropped & 0xFFFFFFFF
    high = ~dropped >> 32 & 0xFFFFFFFF
    words = zip(struct.unpack("=6I", found.raw), (low, low, low, high, high, high), strict=True)
    kept = struct.pack("=6I", *(word & mask for word, mask in words))
    _call_kernel(libc.syscall, machine.capset, header, kept)


def list_readable_paths() -> list[str]:
    """Return the paths that an answer may read: the interpreter's libraries."""
    prefixes = tuple(os.path.realpath(home) + os.sep for home in {sys.prefix, sys.base_prefix})
    own = [path for path in sys.path if path and os.path.realpath(path).startswith(prefixes)]
    return [path for path in (*own, *SHARED_PATHS) if os.path.exists(path)]  # noqa: PTH110 - starts faster


def isolate_command(folder: str | None) -> bool:
    """Keep this process, and all that it starts, from other processes and their variables.

    With a folder, files outside it cannot be changed either, and all capabilities are dropped.
    Reading, the network and the attributes of files, such as their modes, stay as they are. Return
    whether signals reach no other process; before Linux 6.12 they do, and without a folder nothing
    is isolated there.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = _call_kernel(libc.syscall, CREATE_RULESET, None, 0, 1)
    is_scoped = version >= SCOPES_VERSION
    if folder is None and not is_scoped:
        return False
    if folder is not None and version < TRUNCATION_VERSION:
        raise OSError(errno.ENOTSUP, "this version of Landlock lets files be truncated")
    _call_kernel(libc.prctl, NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if folder is None:
        _drop_capabilities(libc, SPYING_CAPABILITIES)
        _apply_landlock(libc, (0, 0, SIGNAL_SCOPE), {})
        return True
    _drop_capabilities(libc)
    changing = CHANGING_RIGHTS & _list_rights(version)
    devices = [path for path in WRITABLE_DEVICES if os.path.exists(path)]  # noqa: PTH110 - starts faster
    allowed = {folder: changing, **dict.fromkeys(devices, changing & (WRITE_FILE | TRUNCATE))}
    if os.path.isdir("/dev/pts"):  # noqa: PTH112
        allowed["/dev/pts"] = changing & (WRITE_FILE | TRUNCATE)
    _apply_landlock(libc, (changing, 0, ALL_SCOPES if is_scoped else 0), allowed)
    return is_scoped


def _restrict_by_landlock(libc: Any, paths: Sequence[str], without: Collection[str]) -> None:
    version = _call_kernel(libc.syscall, CREATE_RULESET, None, 0, 1)
    handled = (
        0 if "files" in without else _list_rights(version),
        0 if "ports" in without or version < PORTS_VERSION else ALL_PORTS,
        0 if "scopes" in without or version < SCOPES_VERSION else ALL_SCOPES,
    )
    if not any(handled):
        return
    readable = {path: READ_FILE | (READ_DIR if os.path.isdir(path) else 0) for path in paths}  # noqa: PTH112
    _apply_landlock(libc, handled, readable if handled[0] else {})


def _list_rights(version: int) -> int:
    """Return all rights that a version of Landlock knows, as bits."""
    return (1 << LANDLOCK_RIGHTS.get(version, 16)) - 1


def _apply_landlock(libc: Any, handled: tuple[int, int, int], allowed: Mapping[str, int]) -> None:
    """Refuse the handled rights of files, ports and scopes, except below allowed paths."""
    ruleset = _call_kernel(libc.syscall, CREATE_RULESET, struct.pack("=3Q", *handled), 24, 0)
    for path, rights in allowed.items():
        descriptor = os.open(path, os.O_PATH)
        _call_kernel(libc.syscall, ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
        os.close(descriptor)
    _call_kernel(libc.syscall, RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def read_calls(calls: str, machine: Processor) -> dict[str, int]:
    """Return the numbers of listed calls that a processor has, by their names."""
    words = calls.split()
    numbers = zip(words[::3], words[machine.column :: 3], strict=True)
    return {name: int(number) for name, number in numbers if number != "-"}


def build_filter(
    machine: Processor, process: int, without: Collection[str] = ()
) -> Iterator[bytes]:
    """Yield the filter's instructions; calls that no rule refuses are allowed."""
    if "foreign calls" not in without:
        yield _instruction(LOAD, 4)
        yield _instruction(EQUAL, machine.mark, yes=1)
        yield _instruction(RETURN, KILL)
    yield _instruction(LOAD, 0)
    if "later calls" not in without:
        yield _instruction(AT_LEAST, FIRST_COMMON_CALL, no=1)
        yield _instruction(RETURN, UNKNOWN)
    for rule, calls in REFUSED_CALLS.items():
        for number in read_calls(calls, machine).values():
            if rule not in without:
                yield _instruction(EQUAL, number, no=1)
                yield _instruction(RETURN, DENY)

    numbers = read_calls(CHECKED_CALLS, machine)
    for rule, checks in ARGUMENT_RULES.items():
        for check in checks:
            if rule not in without and check.call in numbers:
                values = [process if value == OWN_ID else value for value in check.values]
                yield from _build_check(check, numbers[check.call], values)
    if "asynchronous files" not in without:
        yield _instruction(EQUAL, numbers["fcntl"], no=6)
        yield _instruction(LOAD, 24)
        yield _instruction(EQUAL, SET_FLAGS, no=3)
        yield _instruction(LOAD, 32)
        yield _instruction(HAS_BITS, O_ASYNC, no=1)
        yield _instruction(RETURN, DENY)
        yield _instruction(LOAD, 0)
    yield _instruction(RETURN, ALLOW)


def _build_check(check: Check, number: int, values: Sequence[int]) -> Iterator[bytes]:
    yield _instruction(EQUAL, number, no=len(values) + 3)
    yield _instruction(LOAD, 16 + 8 * check.argument)
    for index, value in enumerate(values):
        if check.is_reversed:
            yield _instruction(check.test, value, no=1)
        else:
            yield _instruction(check.test, value, yes=len(values) - index)
    yield _instruction(RETURN, DENY)
    yield _instruction(LOAD, 0)


def _instruction(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def _call_kernel(function: Any, *arguments: Any) -> int:
    result: int = function(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot confine the process: {os.strerror(number)}")
    return result


if __name__ == "__main__":
    main(SandboxRequest(*json.loads(sys.argv[1])))
