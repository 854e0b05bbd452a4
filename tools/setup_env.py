"""Set up an environment with everything that the demo and the tests need.

There is one for each stack of versions that the package is tested on
(:data:`STACKS`). mmcv 2.1.0 has no wheel on the package index, and mmdet
needs its compiled operations. They are compiled once per torch and Python
version and kept in ``$MMDET_NANFIX_CACHE``, by default
``~/.cache/mmdet_nanfix``. An interrupted set-up goes on where it stopped.
Written for any Python 3.8 or newer, standard library only.
"""
from __future__ import annotations

import argparse
import contextlib
import fcntl
import glob
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from typing import (
    Callable,
    Iterator,
    NamedTuple,
    NoReturn,
)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LOG = os.path.join(ROOT, '.setup', 'setup.log')
# mmcv's setup.py imports pkg_resources, which newer setuptools lack.
BUILD = ['setuptools<81', 'wheel', 'ninja', 'psutil']
MMCV = '2.1.0'
HOSTS = ['mmengine==0.10.7', 'mmdet==3.3.0']
STARTED = time.time()


class Stack(NamedTuple):
    """Versions that are tested together.

    Attributes:
        folder: Of the environment, in the checkout.
        pythons: Versions of Python that will do, the first that is found.
        torch: Version of torch.
        numpy: Version of numpy, of which mmcv and torch must be compiled for
            the same major one.
        disk: Gigabytes that the environment takes, packages that the index
            sends along with torch included.
    """

    folder: str
    pythons: tuple[tuple[int, int], ...]
    torch: str
    numpy: str
    disk: float


STACKS = {
    'main': Stack('.venv', ((3, 11), (3, 12), (3, 13)), '2.13.0', '2.4.6', 3),
    # The newest torch that mmcv 2.1.0 has ready-made wheels for. The package
    # index has it with CUDA only on x86, without which it cannot be imported.
    'common': Stack('.venv-common', ((3, 10), (3, 9), (3, 11)), '2.1.2',
                    '1.26.4', 8),
    # The oldest that the package is written for.
    'oldest': Stack('.venv-oldest', ((3, 8), (3, 9), (3, 10)), '2.0.1',
                    '1.24.4', 8),
}


def say(text: str) -> None:
    """One line of progress, with the seconds since the start."""
    print(f'[setup {time.time() - STARTED:4.0f} s] {text}', flush=True)


def give_up(text: str) -> NoReturn:
    """One line that says what to do; exit status 2."""
    print(f'setup: {text}', file=sys.stderr, flush=True)
    sys.exit(2)


def interpreters(version: str) -> Iterator[str]:
    """Paths where a version of Python may be: PATH, then pyenv's own."""
    for name in (sys.executable, f'python{version}'):
        path = shutil.which(name)
        if path:
            yield path
    pyenv = os.environ.get('PYENV_ROOT') or os.path.expanduser('~/.pyenv')
    yield from sorted(glob.glob(os.path.join(
        pyenv, 'versions', f'{version}.*', 'bin', 'python')))


def find_python(stack: Stack) -> str:
    """Find an interpreter that can make a virtual environment."""
    for wanted in stack.pythons:
        probe = ('import sys, venv, ensurepip; '
                 f'sys.exit(sys.version_info[:2] != {wanted!r})')
        for path in interpreters('{}.{}'.format(*wanted)):
            if subprocess.run([path, '-c', probe], stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL).returncode == 0:
                return path
    names = ['{}.{}'.format(*version) for version in stack.pythons]
    give_up(f'no Python {", ".join(names[:-1])} or {names[-1]} with the venv '
            f'module was found; install one (Debian: apt-get install '
            f'python{names[0]}-venv python{names[0]}-dev), or use your own '
            'environment: make demo PYTHON=/path/to/python')


def check_disk(folder: str, gigabytes: float) -> None:
    """Stop early where the disk is too small."""
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    free = shutil.disk_usage(folder).free / 1e9
    if free < gigabytes:
        give_up(f'{folder} has {free:.1f} GB free, {gigabytes} GB are needed;'
                ' free some space and run the same command again')


def explain_failure(what: str, output: str) -> NoReturn:
    """Turn the end of a log into one line."""
    what = what.partition(' (')[0]
    text = output.lower()
    if 'no space left on device' in text:
        give_up(f'the disk is full ({what}); free some space and run the '
                'same command again, it goes on from here')
    signs = ('name resolution', 'name or service not known',
             'connection refused', 'network is unreachable',
             'newconnectionerror', 'read timed out', 'max retries',
             'no matching distribution', 'proxyerror')
    if any(sign in text for sign in signs):
        give_up(f'the package index was not reached ({what}); check the '
                'network or your pip configuration and run the same command '
                f'again, it goes on from here (log: {LOG})')
    give_up(f'{what} failed; the reason is at the end of {LOG}')


@contextlib.contextmanager
def heartbeat(line: Callable[[], str], every: float = 20.) -> Iterator[None]:
    """Repeat a line while something long is running."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(every):
            say(line())

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def run(what: str, command: list[str],
        env: dict[str, str] | None = None,
        line: Callable[[], str] | None = None) -> None:
    """Run a command with its output in the log."""
    os.makedirs(os.path.dirname(LOG), exist_ok=True)
    with open(LOG, 'ab') as log:
        log.write(f'\n$ {" ".join(command)}\n'.encode())
        log.flush()
        begin = log.tell()
        with heartbeat(line or (lambda: f'... {what}')):
            status = subprocess.run(command, stdout=log,
                                    stderr=subprocess.STDOUT,
                                    stdin=subprocess.DEVNULL,
                                    env=env).returncode
    if status != 0:
        with open(LOG, 'rb') as log:
            log.seek(begin)
            output = log.read().decode(errors='replace')
        explain_failure(what, output[-20000:])


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """One set-up at a time compiles into a folder."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, 'lock'), 'w') as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say('another set-up is compiling the same wheel; waiting for it')
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def jobs() -> int:
    """Compilers at a time: one a core, 2 GB each."""
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    return max(1, min(len(os.sched_getaffinity(0)), int(memory / 2e9)))


class Environment:
    """The virtual environment of one stack.

    Args:
        name: Of the stack, a key of :data:`STACKS`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.stack = STACKS[name]
        self.folder = os.path.join(ROOT, self.stack.folder)
        self.python = os.path.join(self.folder, 'bin', 'python')
        self.requirements = os.path.join(ROOT, '.ci',
                                         f'requirements-{name}.txt')
        self._stamp = os.path.join(self.folder, 'nanfix-ready')

    def pip(self, what: str, *arguments: str,
            env: dict[str, str] | None = None,
            line: Callable[[], str] | None = None) -> None:
        """Run pip in the environment."""
        say(what)
        if arguments[0] == 'install':
            # Python compiles what is imported; all of torch takes half a
            # minute.
            arguments = ('install', '-q', '--no-compile', *arguments[1:])
        run(what, [self.python, '-m', 'pip', *arguments], env, line)

    def ask(self, code: str) -> str:
        """Run code in the environment's Python and return what it prints."""
        return subprocess.run([self.python, '-c', code], check=True,
                              stdout=subprocess.PIPE,
                              text=True).stdout.strip()

    def cache_folder(self) -> str:
        """Name the folder of compiled wheels: one per torch and Python."""
        base = os.environ.get('MMDET_NANFIX_CACHE') or os.path.join(
            os.environ.get('XDG_CACHE_HOME') or os.path.join(
                os.path.expanduser('~'), '.cache'), 'mmdet_nanfix')
        key = self.ask('import sys, torch; print(f"torch-{torch.__version__}'
                       '-cp{sys.version_info[0]}{sys.version_info[1]}")')
        return os.path.join(base, f'{key}-{platform.machine()}')

    def check_compiler(self) -> None:
        """Stop early where an extension cannot be compiled."""
        compiler = os.environ.get('CXX', 'c++').split()[0]
        if shutil.which(compiler) is None:
            give_up(f'no C++ compiler ({compiler}) was found, and mmcv must '
                    'be compiled once; install one (Debian: apt-get install '
                    'g++)')
        include = self.ask(
            'import sysconfig; print(sysconfig.get_path("include"))')
        if not os.path.isfile(os.path.join(include, 'Python.h')):
            give_up(f'{include} has no Python.h, and mmcv must be compiled '
                    'once; install the headers (Debian: apt-get install '
                    'python3-dev)')

    def unpack_mmcv(self, folder: str) -> str:
        """Fetch and unpack the sources; objects of an earlier try stay."""
        source = os.path.join(folder, f'mmcv-{MMCV}')
        if os.path.isfile(os.path.join(source, 'unpacked')):
            say(f'going on with the compilation in {source}')
            return source
        self.pip('fetching the sources of mmcv', 'download', '-q',
                 '--no-deps', '--no-build-isolation', '--no-binary', 'mmcv',
                 '-d', folder, f'mmcv=={MMCV}')
        shutil.rmtree(source, ignore_errors=True)
        with tarfile.open(f'{source}.tar.gz') as archive:
            if hasattr(tarfile, 'data_filter'):
                archive.extractall(folder, filter='data')
            else:
                archive.extractall(folder)
        with open(os.path.join(source, 'unpacked'), 'w'):
            pass
        return source

    def build_mmcv(self, folder: str) -> None:
        """Compile the wheel into the cache folder."""
        self.check_compiler()
        check_disk(folder, 1)
        build = os.path.join(folder, 'build')
        os.makedirs(build, exist_ok=True)
        source = self.unpack_mmcv(build)
        kernels = os.path.join(source, 'mmcv', 'ops', 'csrc', 'pytorch')
        total = len(glob.glob(os.path.join(kernels, '*.cpp')) +
                    glob.glob(os.path.join(kernels, 'cpu', '*.cpp')))

        def line() -> str:
            done = glob.glob(os.path.join(source, 'build', '**', '*.o'),
                             recursive=True)
            return f'... compiled {len(done)} of {total} files of mmcv'

        # Python's own flags carry -g, which triples the time of each file.
        env = dict(os.environ, MMCV_WITH_OPS='1', FORCE_CUDA='0',
                   CUDA_VISIBLE_DEVICES='', MAX_JOBS=str(jobs()),
                   CFLAGS='-g0 -O1')
        self.pip(f'compiling the operations of mmcv {MMCV} with {jobs()} '
                 'jobs, once for this torch and Python (5 to 15 minutes on 2 '
                 'cores)', 'wheel', '--no-deps', '--no-build-isolation',
                 '-w', build, source, env=env, line=line)
        wheel = glob.glob(os.path.join(build, 'mmcv-*.whl'))[0]
        os.replace(wheel, os.path.join(folder, os.path.basename(wheel)))
        shutil.rmtree(build)

    def mmcv_wheel(self) -> str:
        """Return the compiled wheel, from the cache or compiled now."""
        folder = self.cache_folder()
        pattern = os.path.join(folder, f'mmcv-{MMCV}-*.whl')
        with locked(folder):
            if not glob.glob(pattern):
                self.build_mmcv(folder)
            else:
                say(f'using the compiled mmcv in {folder}')
        return glob.glob(pattern)[0]

    def fingerprint(self) -> str:
        """Digest what a ready environment depends on."""
        digest = hashlib.sha256(ROOT.encode())
        for path in (__file__, self.requirements,
                     os.path.join(ROOT, 'setup.cfg'),
                     os.path.join(ROOT, 'pyproject.toml')):
            with open(path, 'rb') as file:
                digest.update(file.read())
        return digest.hexdigest()

    def is_ready(self) -> bool:
        """Tell if a set-up with these pins has come to its end."""
        try:
            with open(self._stamp) as file:
                return file.read() == self.fingerprint()
        except OSError:
            return False

    def set_up(self) -> None:
        """Take all steps; each is quick where it is done already."""
        if self.is_ready():
            return
        stack = self.stack
        base = find_python(stack)
        say(f'setting up {stack.folder}: about 2 minutes, and 5 to 15 more '
            f'the first time on a machine, to compile mmcv (log: {LOG})')
        check_disk(ROOT, stack.disk)
        if not os.path.isfile(os.path.join(self.folder, 'bin', 'pip')):
            say(f'making {stack.folder} with {base}')
            run(f'making {stack.folder}',
                [base, '-m', 'venv', '--clear', self.folder])
        numpy = f'numpy=={stack.numpy}'
        self.pip('installing torch (200 MB for a CPU build, several GB for '
                 'the CUDA build that the index may prefer)', 'install',
                 f'torch=={stack.torch}', numpy, *BUILD)
        wheel = self.mmcv_wheel()
        # Together with numpy, which some of them would replace.
        self.pip('installing what mmdet and the tests need', 'install', '-r',
                 self.requirements, numpy)
        # Without dependencies: they ask for an OpenCV that needs a screen.
        self.pip('installing mmcv, mmengine and mmdet', 'install',
                 '--no-deps', wheel, *HOSTS)
        self.pip('installing this checkout, editable', 'install',
                 '--no-deps', '--no-build-isolation', '-e', ROOT)
        say('trying it')
        run('importing mmdet', [self.python, '-c', CHECK])
        with open(self._stamp, 'w') as file:
            file.write(self.fingerprint())
        say('ready')


CHECK = 'import mmdet, mmdet.registry; from mmcv.ops import nms, roi_align'


def check(interpreter: str) -> None:
    """Whether a user's own environment can run the demo."""
    path = shutil.which(interpreter)
    if path is None:
        give_up(f'PYTHON={interpreter} is not an executable')
    done = subprocess.run([path, '-W', 'ignore', '-c',
                           CHECK + '; import rich'],
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          text=True)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:]
        give_up(f'PYTHON={interpreter} cannot run mmdet with mmcv operations '
                f'({"".join(reason)}); install them there, or leave PYTHON '
                'out to have .venv set up')


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--check', metavar='PYTHON',
                        help='only check this interpreter')
    parser.add_argument('--stack', choices=sorted(STACKS), default='main',
                        help='versions to set up (default: main)')
    arguments = parser.parse_args()
    if os.name != 'posix':
        give_up('only Linux and other POSIX systems are supported')
    try:
        if arguments.check:
            check(arguments.check)
        else:
            Environment(arguments.stack).set_up()
    except KeyboardInterrupt:
        give_up('interrupted; the same command goes on from here')
    except OSError as error:
        give_up(f'{error}; free some space or mend the permissions and run '
                'the same command again, it goes on from here')


if __name__ == '__main__':
    main()
