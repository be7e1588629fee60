"""Attempts to leave the sandbox, and the process that makes them.

An escape is Python code. It raises an ``OSError`` if it is refused. Each names the rules that refuse it: with all of
them it is refused, and without them it succeeds, or its call reaches the kernel, which then complains of something
else. Run as a script, this file confines itself without some rules and makes some escapes.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

LIMITS = ("NOFILE", "FSIZE", "AS", "MEMLOCK", "SIGPENDING")
LANDLOCK = ("files", "ports", "scopes")
DONE = "done"

PRELUDE = """
import ctypes, errno, fcntl, mmap, os, resource, signal, socket, struct, sys

def call(number, *arguments):
    "Make a system call."
    libc = ctypes.CDLL(None, use_errno=True)
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = libc.syscall(ctypes.c_long(number), *values)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""


class Escape(NamedTuple):
    """An attempt; ``reaches`` are the kernel's complaints that show that a call was not refused by a rule.

    ``needs_root``: to other users, the kernel itself refuses it.
    """

    name: str
    rules: tuple[str, ...]
    code: str
    reaches: tuple[str, ...] = ()
    needs_root: bool = False


def build_calls(rule: str, calls: dict[str, str], *others: str, needs_root: bool = False) -> list[Escape]:
    """Return an escape for each raw call, which the rule refuses before the kernel looks at its arguments."""
    return [
        Escape(f"the call {name}", (rule, *others), f"call({{{name}}}, {values})", REACHED, needs_root)
        for name, values in calls.items()
    ]


REACHED = (
    "EFAULT",
    "EINVAL",
    "EBADF",
    "ESRCH",
    "ENOENT",
    "ENOSYS",
    "ENOKEY",
    "ENOTTY",
    "ENOTDIR",
    "EOPNOTSUPP",
)
REACHED += ("ENOTSOCK", "E2BIG", "ENODEV", "ENOEXEC")
"""Complaints of the kernel about the arguments of a call."""

ESCAPES = [
    # files
    Escape("a file of the system", ("files",), "open('/etc/passwd').read()"),
    Escape("the run's database", ("files",), "open('{folder}/run.db').read()"),
    Escape("a way around", ("files",), "open('/usr/lib/../../{folder}/run.db').read()"),
    Escape("the parent folder", ("files",), "os.listdir('..')"),
    Escape("the root", ("files",), "os.listdir('/')"),
    Escape("its own folder", ("files",), "os.listdir('.')"),
    Escape("its environment", ("files",), "open('/proc/self/environ').read()"),
    Escape("its own memory", ("files",), "open('/proc/self/mem', 'r+b').close()"),
    Escape("the processes", ("files",), "os.listdir('/proc')"),
    Escape("another's memory", (*LANDLOCK, "capabilities"), "open('/proc/{victim}/mem', 'rb').close()"),
    Escape("a device", ("files",), "open('/dev/zero', 'rb').read(1)"),
    Escape("a file of its own", ("files", "truncation"), "open('note.txt', 'w').write('x')"),
    Escape(
        "a file in /tmp",
        ("files", "truncation"),
        "open('/tmp/{name}', 'w').close(); os.remove('/tmp/{name}')",
    ),
    Escape("a nameless file", ("files",), "os.close(os.open('{folder}', os.O_TMPFILE | os.O_WRONLY))"),
    Escape("the database for writing", ("files",), "open('{folder}/run.db', 'r+').close()"),
    Escape("the database for appending", ("files",), "open('{folder}/run.db', 'a').close()"),
    Escape("a folder", ("files",), "os.mkdir('{folder}/new'); os.rmdir('{folder}/new')"),
    Escape("a symbolic link", ("files",), "os.symlink('/etc/passwd', '{folder}/l'); os.remove('{folder}/l')"),
    Escape("a hard link", ("files",), "os.link('{folder}/run.db', '{folder}/h'); os.remove('{folder}/h')"),
    Escape("a pipe with a name", ("files",), "os.mkfifo('{folder}/p'); os.remove('{folder}/p')"),
    Escape(
        "another name for the database",
        ("files",),
        "os.rename('{folder}/run.db', '{folder}/r'); os.rename('{folder}/r', '{folder}/run.db')",
    ),
    Escape("the end of the database", ("files",), "os.remove('{folder}/run.db')"),
    Escape(
        "an empty database", ("truncation", "files"), "os.open('{folder}/run.db', os.O_RDONLY | os.O_TRUNC)"
    ),
    # attributes of files
    Escape("the database's length", ("file attributes", "files"), "os.truncate('{folder}/run.db', 6)"),
    Escape("the database's mode", ("file attributes",), "os.chmod('{folder}/run.db', 0o644)"),
    Escape("the database's times", ("file attributes",), "os.utime('{folder}/run.db')"),
    Escape("the database's owner", ("file attributes",), "os.chown('{folder}/run.db', os.getuid(), -1)"),
    Escape("a link's owner", ("file attributes",), "os.lchown('{folder}/run.db', os.getuid(), -1)"),
    Escape("an open file's mode", ("file attributes",), "os.fchmod(0, 0o644)"),
    Escape("an open file's owner", ("file attributes",), "os.fchown(0, os.getuid(), -1)"),
    Escape("an open file's times", ("file attributes",), "os.utime(0)"),
    Escape("an attribute", ("file attributes",), "os.setxattr(0, 'user.x', b'x')", ("EOPNOTSUPP",)),
    Escape("no attribute", ("file attributes",), "os.removexattr(0, 'user.y')", ("EOPNOTSUPP", "ENODATA")),
    # locks, leases, watches, handles
    Escape("a lock on a library", ("file locks",), "fcntl.flock(os.open(os.__file__, 0), 6)"),
    Escape("a shared lock on a library", ("fcntl commands",), "fcntl.lockf(os.open(os.__file__, 0), 5)"),
    Escape(
        "a lock of an open library",
        ("fcntl commands",),
        "fcntl.fcntl(os.open(os.__file__, 0), 37, struct.pack('hhqqi4x', 0, 0, 0, 0, 0))",
    ),
    Escape("a lease", ("fcntl commands",), "fcntl.fcntl(0, fcntl.F_SETLEASE, fcntl.F_RDLCK)"),
    Escape(
        "notes of a folder", ("fcntl commands",), "fcntl.fcntl(os.open('/usr/lib', 0), 1026, 1)", ("EINVAL",)
    ),
    Escape("a hint to a disk", ("fcntl commands",), "fcntl.fcntl(0, 1036, struct.pack('Q', 1))"),
    Escape("a larger pipe", ("fcntl commands",), "fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)"),
    Escape("a watch", ("file watches",), "call({inotify_init1}, 0)"),
    Escape("a watch of many", ("file watches",), "call({fanotify_init}, 0x200, 0)", ("ENOSYS", "EINVAL")),
    Escape(
        "a file's handle",
        ("file handles",),
        "call({name_to_handle_at}, -100, b'/usr/lib', struct.pack('Ii128x', 128, 0), bytes(8), 0)",
        ("EOPNOTSUPP",),
    ),
    *build_calls("file handles", {"open_by_handle_at": "0, None, 0"}),
    # signals through files
    Escape("an owner of a socket", ("fcntl commands",), "fcntl.fcntl(socket.socketpair()[0], 8, {victim})"),
    Escape(
        "another kind of owner",
        ("fcntl commands",),
        "fcntl.fcntl(socket.socketpair()[0], 15, struct.pack('ii', 1, {victim}))",
    ),
    Escape("another signal", ("fcntl commands",), "fcntl.fcntl(socket.socketpair()[0], 10, 9)"),
    Escape(
        "an asynchronous socket",
        ("asynchronous files",),
        "a = socket.socketpair()[0]; fcntl.fcntl(a, fcntl.F_SETFL, 0x2000)",
    ),
    Escape(
        "an owner by ioctl",
        ("ioctl commands",),
        "fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', {victim}))",
    ),
    Escape(
        "a group by ioctl",
        ("ioctl commands",),
        "fcntl.ioctl(socket.socketpair()[0], 0x8902, struct.pack('i', {victim}))",
    ),
    Escape(
        "an asynchronous socket by ioctl",
        ("ioctl commands",),
        "fcntl.ioctl(socket.socketpair()[0], 0x5452, struct.pack('i', 1))",
    ),
    Escape("input for a terminal", ("ioctl commands",), "fcntl.ioctl(0, 0x5412, b'x')", ("ENOTTY", "EIO")),
    Escape("a terminal of its own", ("ioctl commands",), "fcntl.ioctl(0, 0x540E, 0)", ("ENOTTY",)),
    Escape("a file's flags", ("ioctl commands",), "fcntl.ioctl(0, 0x80086601, bytes(8))", ("ENOTTY",)),
    Escape(
        "a file's clone",
        ("ioctl commands",),
        "fcntl.ioctl(0, 0x40049409, 0)",
        ("EBADF", "EINVAL", "EOPNOTSUPP"),
    ),
    # processes and signals
    Escape("a fork", ("threads alone",), "if os.fork() == 0: os._exit(0)"),
    Escape(
        "a spawned program",
        ("threads alone", "processes"),
        "os.posix_spawn('/nonexistent', ['x'], {})",
        ("ENOENT",),
    ),
    Escape(
        "a child",
        ("processes", "files"),
        "import subprocess; subprocess.run([sys.executable, '-c', ''], check=True)",
    ),
    Escape("another program", ("processes",), "os.execv('/nonexistent', ['x'])", ("ENOENT",)),
    Escape(
        "this program again",
        ("processes", "files"),
        "os.execv(sys.executable, ['python', '-c', 'print(chr(34) + chr(100) + chr(111) + chr(110) + chr(101) + chr(34))'])",
    ),
    *build_calls("processes", {"execveat": "0, None, None, None, 0"}),
    Escape("a session", ("processes",), "os.setsid()"),
    Escape("a group", ("processes",), "os.setpgid(0, 0)"),
    Escape("a signal to another process", ("own signals", "scopes"), "os.kill({victim}, 0)"),
    Escape("a signal to all", ("own signals",), "os.kill(-1, 0)"),
    Escape("a signal to its group", ("own signals",), "os.kill(0, 0)"),
    Escape("a signal to a thread", ("signals", "scopes"), "call({tkill}, {victim}, 0)"),
    Escape("a signal to its thread", ("own signals", "scopes"), "call({tgkill}, {victim}, {victim}, 0)"),
    Escape(
        "a queued signal",
        ("signals", "scopes"),
        "call({rt_sigqueueinfo}, {victim}, 0, struct.pack('iii116x', 0, 0, -1))",
    ),
    Escape(
        "a queued signal to a thread",
        ("signals", "scopes"),
        "call({rt_tgsigqueueinfo}, {victim}, {victim}, 0, struct.pack('iii116x', 0, 0, -1))",
    ),
    Escape("a life after its parent", ("death signal",), "call({prctl}, 1, 0)"),
    # other processes
    Escape(
        "another's trace", ("tracing", *LANDLOCK, "capabilities"), "call({ptrace}, 0x4206, {victim}, 0, 0)"
    ),
    Escape(
        "another's memory by a call", ("tracing",), "call({process_vm_readv}, {victim}, None, 0, None, 0, 0)"
    ),
    Escape(
        "another's memory for writing",
        ("tracing",),
        "call({process_vm_writev}, {victim}, None, 0, None, 0, 0)",
    ),
    Escape(
        "another's files",
        ("tracing", *LANDLOCK, "capabilities"),
        "call({kcmp}, os.getpid(), {victim}, 2, 0, 0)",
    ),
    *build_calls("tracing", {"perf_event_open": "None, 0, -1, -1, 0", "get_robust_list": "0, None, None"}),
    Escape("another's limits", ("own limits",), "resource.prlimit({victim}, resource.RLIMIT_CORE)"),
    Escape(
        "another's priority",
        ("scheduling", "capabilities"),
        "os.setpriority(os.PRIO_PROCESS, {victim}, os.getpriority(os.PRIO_PROCESS, {victim}))",
    ),
    Escape(
        "another's processors",
        ("scheduling", "capabilities"),
        "os.sched_setaffinity({victim}, os.sched_getaffinity({victim}))",
    ),
    Escape(
        "another's schedule",
        ("scheduling", "capabilities"),
        "os.sched_setscheduler({victim}, 0, os.sched_param(0))",
    ),
    Escape(
        "another's parameters",
        ("scheduling", "capabilities"),
        "os.sched_setparam({victim}, os.sched_param(0))",
    ),
    *build_calls("scheduling", {"ioprio_set": "1, {victim}, 0x4004"}, "capabilities"),
    *build_calls("scheduling", {"sched_setattr": "{victim}, None, 0", "migrate_pages": "0, 64, None, None"}),
    *build_calls("scheduling", {"move_pages": "0, 0, None, None, None, 99"}),
    # sockets
    Escape("a socket", ("sockets",), "socket.socket().close()"),
    Escape("a datagram", ("sockets",), "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()"),
    Escape("a local socket", ("sockets",), "socket.socket(socket.AF_UNIX).close()"),
    Escape("a socket of the kernel", ("sockets",), "socket.socket(16, socket.SOCK_RAW, 0).close()"),
    Escape("a local server", ("sockets", "ports"), "socket.create_connection(('127.0.0.1', {port})).close()"),
    Escape(
        "a server of its own",
        ("sockets", "ports"),
        "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()",
    ),
    Escape(
        "a socket without a file",
        ("sockets", "scopes"),
        "s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + '{name}')",
    ),
    Escape("a pair of datagram sockets", ("stream pairs",), "[s.close() for s in socket.socketpair(type=2)]"),
    *build_calls("sockets", {"connect": "0, None, 0", "bind": "0, None, 0", "listen": "0, 0"}),
    *build_calls("sockets", {"accept": "0, None, None", "accept4": "0, None, None, 0"}),
    # objects that outlive the process
    Escape("memory as a file", ("shared memory",), "os.close(os.memfd_create('x'))"),
    Escape("shared memory", ("shared memory",), "call({shmctl}, call({shmget}, 0, 4096, 0o1600), 0, None)"),
    Escape("a queue", ("shared memory",), "call({msgctl}, call({msgget}, 0, 0o1600), 0, None)"),
    Escape("semaphores", ("shared memory",), "call({semctl}, call({semget}, 0, 1, 0o1600), 0, 0, 0)"),
    *build_calls(
        "shared memory", {"mq_open": "None, 0, 0, None", "mq_unlink": "None", "shmat": "-1, None, 0"}
    ),
    *build_calls("shared memory", {"msgsnd": "-1, None, 0, 0", "msgrcv": "-1, None, 0, 0, 0"}),
    *build_calls("shared memory", {"semop": "-1, None, 0", "semtimedop": "-1, None, 0, None"}),
    Escape("a key", ("keys",), "call({add_key}, b'user', b'x', b'y', 1, -2)", ("ENOSYS",)),
    *build_calls("keys", {"request_key": "None, None, None, 0", "keyctl": "0, -2, 0"}),
    # the system
    *build_calls("namespaces", {"unshare": "0", "setns": "0, 0", "chroot": "None", "umount2": "None, 0"}),
    *build_calls("namespaces", {"mount": "None, None, None, 0, None"}),
    *build_calls("namespaces", {"pivot_root": "None, None"}, "capabilities", needs_root=True),
    *build_calls("disks", {"syncfs": "-1", "io_setup": "0, None"}),
    *build_calls("disks", {"quotactl": "0, None, 0, None"}),
    *build_calls("disks", {"swapon": "None, 0", "swapoff": "None"}, "capabilities", needs_root=True),
    *build_calls("clocks", {"adjtimex": "None", "clock_settime": "-1, None", "clock_adjtime": "0, None"}),
    *build_calls("clocks", {"settimeofday": "None, None"}, "capabilities", needs_root=True),
    *build_calls("kernel", {"userfaultfd": "0x40000001", "personality": "0xffffffff"}),
    *build_calls("kernel", {"syslog": "99, None, 0"}, "capabilities", needs_root=True),
    *build_calls("kernel", {"bpf": "99, None, 0"}, needs_root=True),
    *build_calls(
        "kernel", {"acct": "b'/nonexistent/x'", "reboot": "0, 0, 0"}, "capabilities", needs_root=True
    ),
    *build_calls("kernel", {"init_module": "None, 0, None"}, "capabilities", needs_root=True),
    *build_calls(
        "kernel", {"delete_module": "None, 0", "finit_module": "-1, None, 0"}, "capabilities", needs_root=True
    ),
    *build_calls("kernel", {"kexec_load": "0, 1000, None, 0"}, "capabilities", needs_root=True),
    *build_calls("kernel", {"kexec_file_load": "-1, -1, 0, None, 99"}, "capabilities", needs_root=True),
    *build_calls(
        "kernel",
        {"sethostname": "None, 1000", "setdomainname": "None, 1000"},
        "capabilities",
        needs_root=True,
    ),
    # calls since Linux 5.1
    Escape("a descriptor of a process", ("later calls",), "call(434, {victim}, 0)"),
    Escape(
        "a signal by descriptor",
        ("later calls", "scopes"),
        "call(424, call(434, {victim}, 0), 0, None, 0)",
    ),
    Escape("a ring of calls", ("later calls", "MEMLOCK"), "call(425, 1, bytes(120))", ("EPERM",)),
    Escape("a newer clone", ("later calls",), "call(435, None, 0)", ("EINVAL",)),
    Escape("a newer way to open", ("later calls",), "call(437, -100, b'/usr/lib', bytes(24), 24)"),
    Escape("a newer mode", ("later calls",), "call(452, -100, b'{folder}/run.db', 0o644, 0)", ("ENOSYS",)),
    Escape("a newer mount", ("later calls",), "call(430, None, 0)", ("EPERM", "EFAULT")),
    Escape("secret memory", ("later calls",), "call(447, 0)", ("ENOSYS",)),
    Escape("advice to a process", ("later calls",), "call(440, -1, None, 0, 0, 0)", ("EBADF", "EINVAL")),
    Escape("further rules of Landlock", ("later calls",), "call(444, None, 0, 1)"),
    # rights and limits
    Escape("another user", ("capabilities",), "os.setuid(12345)", needs_root=True),
    Escape("other groups", ("capabilities",), "os.setgroups([])", needs_root=True),
    Escape("many files", ("NOFILE",), "[os.dup(0) for _ in range(100)]"),
    Escape("a huge file", ("FSIZE",), "os.pwrite({output}, b'x', 2 << 20)"),
    Escape("much memory", ("AS",), "mmap.mmap(-1, 2 << 30).close()"),
    Escape(
        "locked memory",
        ("MEMLOCK",),
        "m = mmap.mmap(-1, 4096); call({mlock}, ctypes.addressof(ctypes.c_char.from_buffer(m)), 4096)",
    ),
    Escape("many timers", ("SIGPENDING",), "[call({timer_create}, 1, None, bytes(8)) for _ in range(100)]"),
]

NUMBERS = {
    "x86_64": {"kill": 62, "tgkill": 234, "prctl": 157, "mlock": 149, "timer_create": 222},
    "aarch64": {"kill": 129, "tgkill": 131, "prctl": 167, "mlock": 228, "timer_create": 107},
}
"""Numbers of calls that no list of refused calls has."""


def main(order: dict[str, Any]) -> None:
    """Confine this process without some rules, make attempts, and print the outcome of each."""
    spec = importlib.util.spec_from_file_location("sandbox", order["sandbox"])
    assert spec is not None
    assert spec.loader is not None
    sandbox = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sandbox)
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    request = sandbox.SandboxRequest(None, 0, 0, 60, 1 << 30, 1 << 20, True)
    sandbox.set_limits(request, alone=False, without=order["without"])
    sandbox.confine_process(os.getppid(), without=order["without"])
    for code in order["attempts"]:
        outcome = DONE
        try:
            exec(code, dict(names))
        except MemoryError:
            outcome = "ENOMEM"
        except OSError as error:
            outcome = errno.errorcode[error.errno or 0]
        os.write(1, json.dumps(outcome).encode() + b"\n")


if __name__ == "__main__":
    main(json.loads(Path("/dev/stdin").read_text(encoding="utf-8") if len(sys.argv) < 2 else sys.argv[1]))
