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
from collections.abc import Iterator
from typing import Any, NamedTuple

LIMITS = ("NOFILE", "FSIZE", "AS", "MEMLOCK", "SIGPENDING")
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
    """An attempt; ``reaches`` are the kernel's complaints that show that no rule refused a call.

    ``needs_root``: to other users, the kernel itself refuses it.
    """

    name: str
    rules: tuple[str, ...]
    code: str
    reaches: tuple[str, ...] = ()
    needs_root: bool = False


def read_escapes(table: str) -> Iterator[Escape]:
    """Yield the escapes of a table, in which ``*`` means that only root may try."""
    for line in table.strip().splitlines():
        name, rules, code, *reaches = line.removeprefix("*").split(" :: ")
        names = tuple(rules.split(", "))
        needs_root = line.startswith("*")
        if name != "calls":
            reached = tuple(", ".join(reaches).split(", ")) if reaches else ()
            yield Escape(name, names, code, reached, needs_root)
            continue
        for call in code.split("; "):
            name, _, values = call.partition("(")
            yield Escape(f"the call {name}", names, f"call({{{name}}}, {values}", REACHED, needs_root)


REACHED = (
    *("EFAULT", "EINVAL", "EBADF", "ESRCH", "ENOENT", "ENOSYS", "ENOKEY", "ENOTTY", "ENOTDIR"),
    *("EOPNOTSUPP", "ENOTSOCK", "E2BIG", "ENODEV", "ENOEXEC"),
)
"""Complaints of the kernel about the arguments of a call."""

TABLE = r"""
a file of the system :: files :: open('/etc/passwd').read()
the run's database :: files :: open('{folder}/run.db').read()
a way around :: files :: open('/usr/lib/../../{folder}/run.db').read()
the parent folder :: files :: os.listdir('..')
the root :: files :: os.listdir('/')
its own folder :: files :: os.listdir('.')
its environment :: files :: open('/proc/self/environ').read()
its own memory :: files :: open('/proc/self/mem', 'r+b').close()
the processes :: files :: os.listdir('/proc')
another's memory :: files, ports, scopes, capabilities :: open('/proc/{victim}/mem', 'rb').close()
a device :: files :: open('/dev/zero', 'rb').read(1)
a file of its own :: files, truncation :: open('note.txt', 'w').write('x')
a file in /tmp :: files, truncation :: open('/tmp/{name}', 'w').close(); os.remove('/tmp/{name}')
a nameless file :: files :: os.close(os.open('{folder}', os.O_TMPFILE | os.O_WRONLY))
the database for writing :: files :: open('{folder}/run.db', 'r+').close()
the database for appending :: files :: open('{folder}/run.db', 'a').close()
a folder :: files :: os.mkdir('{folder}/new'); os.rmdir('{folder}/new')
a symbolic link :: files :: os.symlink('/etc/passwd', '{folder}/l'); os.remove('{folder}/l')
a hard link :: files :: os.link('{folder}/run.db', '{folder}/h'); os.remove('{folder}/h')
a pipe with a name :: files :: os.mkfifo('{folder}/p'); os.remove('{folder}/p')
another name for the database :: files :: os.rename('{folder}/run.db', '{folder}/r'); os.rename('{folder}/r', '{folder}/run.db')
the end of the database :: files :: os.remove('{folder}/run.db')
an empty database :: truncation, files :: os.open('{folder}/run.db', os.O_RDONLY | os.O_TRUNC)
the database's length :: file attributes, files :: os.truncate('{folder}/run.db', 6)
the database's mode :: file attributes :: os.chmod('{folder}/run.db', 0o644)
the database's times :: file attributes :: os.utime('{folder}/run.db')
the database's owner :: file attributes :: os.chown('{folder}/run.db', os.getuid(), -1)
a link's owner :: file attributes :: os.lchown('{folder}/run.db', os.getuid(), -1)
an open file's mode :: file attributes :: os.fchmod(0, 0o644)
an open file's owner :: file attributes :: os.fchown(0, os.getuid(), -1)
an open file's times :: file attributes :: os.utime(0)
an attribute :: file attributes :: os.setxattr(0, 'user.x', b'x') :: EOPNOTSUPP
no attribute :: file attributes :: os.removexattr(0, 'user.y') :: EOPNOTSUPP, ENODATA
a lock on a library :: file locks :: fcntl.flock(os.open(os.__file__, 0), 6)
a shared lock on a library :: fcntl commands :: fcntl.lockf(os.open(os.__file__, 0), 5)
a lock of an open library :: fcntl commands :: fcntl.fcntl(os.open(os.__file__, 0), 37, struct.pack('hhqqi4x', 0, 0, 0, 0, 0))
a lease :: fcntl commands :: fcntl.fcntl(0, fcntl.F_SETLEASE, fcntl.F_RDLCK)
notes of a folder :: fcntl commands :: fcntl.fcntl(os.open('/usr/lib', 0), 1026, 1) :: EINVAL
a hint to a disk :: fcntl commands :: fcntl.fcntl(0, 1036, struct.pack('Q', 1))
a larger pipe :: fcntl commands :: fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)
a watch :: file watches :: call({inotify_init1}, 0)
a watch of many :: file watches :: call({fanotify_init}, 0x200, 0) :: ENOSYS, EINVAL
a file's handle :: file handles :: call({name_to_handle_at}, -100, b'/usr/lib', struct.pack('Ii128x', 128, 0), bytes(8), 0) :: EOPNOTSUPP
calls :: file handles :: open_by_handle_at(0, None, 0)
an owner of a socket :: fcntl commands :: fcntl.fcntl(socket.socketpair()[0], 8, {victim})
another kind of owner :: fcntl commands :: fcntl.fcntl(socket.socketpair()[0], 15, struct.pack('ii', 1, {victim}))
another signal :: fcntl commands :: fcntl.fcntl(socket.socketpair()[0], 10, 9)
an asynchronous socket :: asynchronous files :: a = socket.socketpair()[0]; fcntl.fcntl(a, fcntl.F_SETFL, 0x2000)
an owner by ioctl :: ioctl commands :: fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', {victim}))
a group by ioctl :: ioctl commands :: fcntl.ioctl(socket.socketpair()[0], 0x8902, struct.pack('i', {victim}))
an asynchronous socket by ioctl :: ioctl commands :: fcntl.ioctl(socket.socketpair()[0], 0x5452, struct.pack('i', 1))
input for a terminal :: ioctl commands :: fcntl.ioctl(0, 0x5412, b'x') :: ENOTTY, EIO
a terminal of its own :: ioctl commands :: fcntl.ioctl(0, 0x540E, 0) :: ENOTTY
a file's flags :: ioctl commands :: fcntl.ioctl(0, 0x80086601, bytes(8)) :: ENOTTY
a file's clone :: ioctl commands :: fcntl.ioctl(0, 0x40049409, 0) :: EBADF, EINVAL, EOPNOTSUPP
a fork :: threads alone :: if os.fork() == 0: os._exit(0)
a spawned program :: threads alone, processes :: os.posix_spawn('/nonexistent', ['x'], {}) :: ENOENT
a child :: processes, files :: import subprocess; subprocess.run([sys.executable, '-c', ''], check=True)
another program :: processes :: os.execv('/nonexistent', ['x']) :: ENOENT
this program again :: processes, files :: os.execv(sys.executable, ['python', '-c', 'print(chr(34) + chr(100) + chr(111) + chr(110) + chr(101) + chr(34))'])
calls :: processes :: execveat(0, None, None, None, 0)
a session :: processes :: os.setsid()
a group :: processes :: os.setpgid(0, 0)
a signal to another process :: own signals, scopes :: os.kill({victim}, 0)
a signal to all :: own signals :: os.kill(-1, 0)
a signal to its group :: own signals :: os.kill(0, 0)
a signal to a thread :: signals, scopes :: call({tkill}, {victim}, 0)
a signal to its thread :: own signals, scopes :: call({tgkill}, {victim}, {victim}, 0)
a queued signal :: signals, scopes :: call({rt_sigqueueinfo}, {victim}, 0, struct.pack('iii116x', 0, 0, -1))
a queued signal to a thread :: signals, scopes :: call({rt_tgsigqueueinfo}, {victim}, {victim}, 0, struct.pack('iii116x', 0, 0, -1))
a life after its parent :: death signal :: call({prctl}, 1, 0)
another's trace :: tracing, files, ports, scopes, capabilities :: call({ptrace}, 0x4206, {victim}, 0, 0)
another's memory by a call :: tracing :: call({process_vm_readv}, {victim}, None, 0, None, 0, 0)
another's memory for writing :: tracing :: call({process_vm_writev}, {victim}, None, 0, None, 0, 0)
another's files :: tracing, files, ports, scopes, capabilities :: call({kcmp}, os.getpid(), {victim}, 2, 0, 0)
calls :: tracing :: perf_event_open(None, 0, -1, -1, 0); get_robust_list(0, None, None)
another's limits :: own limits :: resource.prlimit({victim}, resource.RLIMIT_CORE)
another's priority :: scheduling, capabilities :: os.setpriority(os.PRIO_PROCESS, {victim}, os.getpriority(os.PRIO_PROCESS, {victim}))
another's processors :: scheduling, capabilities :: os.sched_setaffinity({victim}, os.sched_getaffinity({victim}))
another's schedule :: scheduling, capabilities :: os.sched_setscheduler({victim}, 0, os.sched_param(0))
another's parameters :: scheduling, capabilities :: os.sched_setparam({victim}, os.sched_param(0))
calls :: scheduling, capabilities :: ioprio_set(1, {victim}, 0x4004)
calls :: scheduling :: sched_setattr({victim}, None, 0); migrate_pages(0, 64, None, None)
calls :: scheduling :: move_pages(0, 0, None, None, None, 99)
a socket :: sockets :: socket.socket().close()
a datagram :: sockets :: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
a local socket :: sockets :: socket.socket(socket.AF_UNIX).close()
a socket of the kernel :: sockets :: socket.socket(16, socket.SOCK_RAW, 0).close()
a local server :: sockets, ports :: socket.create_connection(('127.0.0.1', {port})).close()
a server of its own :: sockets, ports :: s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()
a socket without a file :: sockets, scopes :: s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + '{name}')
a pair of datagram sockets :: stream pairs :: [s.close() for s in socket.socketpair(type=2)]
calls :: sockets :: connect(0, None, 0); bind(0, None, 0); listen(0, 0); accept(0, None, None)
calls :: sockets :: accept4(0, None, None, 0)
memory as a file :: shared memory :: os.close(os.memfd_create('x'))
shared memory :: shared memory :: call({shmctl}, call({shmget}, 0, 4096, 0o1600), 0, None)
a queue :: shared memory :: call({msgctl}, call({msgget}, 0, 0o1600), 0, None)
semaphores :: shared memory :: call({semctl}, call({semget}, 0, 1, 0o1600), 0, 0, 0)
calls :: shared memory :: mq_open(None, 0, 0, None); mq_unlink(None); shmat(-1, None, 0)
calls :: shared memory :: msgsnd(-1, None, 0, 0); msgrcv(-1, None, 0, 0, 0); semop(-1, None, 0)
calls :: shared memory :: semtimedop(-1, None, 0, None)
a key :: keys :: call({add_key}, b'user', b'x', b'y', 1, -2) :: ENOSYS
calls :: keys :: request_key(None, None, None, 0); keyctl(0, -2, 0)
calls :: namespaces :: unshare(0); setns(0, 0); chroot(None); umount2(None, 0)
calls :: namespaces :: mount(None, None, None, 0, None)
*calls :: namespaces, capabilities :: pivot_root(None, None)
calls :: disks :: syncfs(-1); io_setup(0, None); quotactl(0, None, 0, None)
*calls :: disks, capabilities :: swapon(None, 0); swapoff(None)
calls :: clocks :: adjtimex(None); clock_settime(-1, None); clock_adjtime(0, None)
*calls :: clocks, capabilities :: settimeofday(None, None)
calls :: kernel :: userfaultfd(0x40000001); personality(0xffffffff)
*calls :: kernel, capabilities :: syslog(99, None, 0)
*calls :: kernel :: bpf(99, None, 0)
*calls :: kernel, capabilities :: acct(b'/nonexistent/x'); reboot(0, 0, 0)
*calls :: kernel, capabilities :: init_module(None, 0, None); delete_module(None, 0)
*calls :: kernel, capabilities :: finit_module(-1, None, 0); kexec_load(0, 1000, None, 0)
*calls :: kernel, capabilities :: kexec_file_load(-1, -1, 0, None, 99); sethostname(None, 1000)
*calls :: kernel, capabilities :: setdomainname(None, 1000)
a descriptor of a process :: later calls :: call(434, {victim}, 0)
a signal by descriptor :: later calls, scopes :: call(424, call(434, {victim}, 0), 0, None, 0)
a ring of calls :: later calls, MEMLOCK :: call(425, 1, bytes(120)) :: EPERM
a newer clone :: later calls :: call(435, None, 0) :: EINVAL
a newer way to open :: later calls :: call(437, -100, b'/usr/lib', bytes(24), 24)
a newer mode :: later calls :: call(452, -100, b'{folder}/run.db', 0o644, 0) :: ENOSYS
a newer mount :: later calls :: call(430, None, 0) :: EPERM, EFAULT
secret memory :: later calls :: call(447, 0) :: ENOSYS
advice to a process :: later calls :: call(440, -1, None, 0, 0, 0) :: EBADF, EINVAL
further rules of Landlock :: later calls :: call(444, None, 0, 1)
*another user :: capabilities :: os.setuid(12345)
*other groups :: capabilities :: os.setgroups([])
many files :: NOFILE :: [os.dup(0) for _ in range(100)]
a huge file :: FSIZE :: os.pwrite({output}, b'x', 2 << 20)
much memory :: AS :: mmap.mmap(-1, 2 << 30).close()
locked memory :: MEMLOCK :: m = mmap.mmap(-1, 4096); call({mlock}, ctypes.addressof(ctypes.c_char.from_buffer(m)), 4096)
many timers :: SIGPENDING :: [call({timer_create}, 1, None, bytes(8)) for _ in range(100)]
"""
"""Name, rules, code and, where a call reaches the kernel, its complaints; or several raw calls."""

ESCAPES = [*read_escapes(TABLE)]

MORE_CALLS = "kill 62 129  tgkill 234 131  prctl 157 167  mlock 149 228  timer_create 222 107"
"""Numbers of further calls, as in the sandbox."""


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
    main(json.loads(sys.argv[1]))
