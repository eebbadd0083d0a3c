//! A device model that is taken over makes calls that a worker never does: each ends the process.
//! Without the filter each goes through, so an attack that is stopped was one.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use super::calls;

/// Names the attack, in a child.
const ATTACK: &str = "EXITLESS_TEST_ATTACK";
/// Set in a child that goes without a filter.
const FREE: &str = "EXITLESS_TEST_FREE";

/// Bytes of the disk.
const CAPACITY: i64 = 1 << 20;

/// System calls by name, with arguments that are allowed to fail.
fn attack(name: &str) -> Option<()> {
    let path = c"/etc/passwd".as_ptr();
    let null = std::ptr::null::<libc::c_void>();
    let rwx = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: none of these calls writes memory of this process but for its own results, or runs
    // code: what they name is constant, null, or a number; a fork's child ends at once.
    unsafe {
        match name {
            "open" => libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path, libc::O_RDONLY),
            "socket" => libc::syscall(libc::SYS_socket, libc::AF_UNIX, libc::SOCK_STREAM, 0),
            "ptrace" => libc::syscall(libc::SYS_ptrace, libc::PTRACE_ATTACH, 1, null, null),
            "process_vm_readv" => libc::syscall(libc::SYS_process_vm_readv, 1, null, 0, null, 0, 0),
            "execve" => libc::syscall(libc::SYS_execve, c"/nonexistent".as_ptr(), null, null),
            "io_uring" => libc::syscall(libc::SYS_io_uring_setup, 0, null),
            "clone" => {
                match libc::syscall(libc::SYS_clone, libc::SIGCHLD, null, null, null, null) {
                    0 => libc::_exit(0),
                    pid => pid,
                }
            }
            "executable memory" => libc::syscall(libc::SYS_mmap, null, 4096, rwx, private, -1, 0),
            "shared memory" => {
                let shared = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
                libc::syscall(libc::SYS_mmap, null, 4096, libc::PROT_READ, shared, -1, 0)
            }
            "memory made executable" => libc::syscall(libc::SYS_mprotect, null, 0, rwx),
            "space behind the end" => libc::syscall(
                libc::SYS_fallocate,
                -1,
                libc::FALLOC_FL_KEEP_SIZE,
                CAPACITY + 1,
                1,
            ),
            "more space than the disk" => {
                let zero = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
                libc::syscall(libc::SYS_fallocate, -1, zero, 0, CAPACITY + 1)
            }
            "a larger file" => libc::syscall(libc::SYS_fallocate, -1, 0, 0, CAPACITY),
            "a collapsed range" => {
                let mode = libc::FALLOC_FL_COLLAPSE_RANGE | libc::FALLOC_FL_KEEP_SIZE;
                libc::syscall(libc::SYS_fallocate, -1, mode, 0, CAPACITY)
            }
            "kill" => libc::syscall(libc::SYS_kill, 0, 0),
            "dup" => libc::syscall(libc::SYS_dup, 0),
            _ => return None,
        };
    }
    Some(())
}

const ATTACKS: [&str; 16] = [
    "open",
    "socket",
    "ptrace",
    "process_vm_readv",
    "execve",
    "io_uring",
    "clone",
    "executable memory",
    "shared memory",
    "memory made executable",
    "space behind the end",
    "more space than the disk",
    "a larger file",
    "a collapsed range",
    "kill",
    "dup",
];

/// Runs `name` in a process of its own; how that ended.
fn run(name: &str, is_free: bool) -> std::process::ExitStatus {
    let mut child = Command::new(std::env::current_exe().expect("a test has a file"));
    child.args(["--exact", "tests::child_attacks", "--ignored"]);
    child
        .args(["--test-threads=1", "--quiet"])
        .env(ATTACK, name);
    if is_free {
        child.env(FREE, "1");
    }
    child.output().expect("a process").status
}

#[test]
fn each_call_beyond_the_loop_ends_the_process() {
    for name in ATTACKS {
        assert_eq!(
            run(name, true).code(),
            Some(0),
            "{name} does not go through"
        );
        assert_eq!(run(name, false).signal(), Some(libc::SIGSYS), "{name}");
    }
}

#[test]
fn calls_of_the_loop_are_allowed() {
    assert_eq!(run("", false).code(), Some(0));
}

#[test]
#[ignore = "run in a child by the tests above"]
fn child_attacks() {
    let name = std::env::var(ATTACK).expect("its parent names it");
    let is_free = std::env::var_os(FREE).is_some();
    confine::drop_privileges().expect("privileges can be dropped");
    if !is_free {
        confine::allow_only(&calls::allowed(CAPACITY as u64)).expect("a filter");
    }
    let made = attack(&name);
    assert_eq!(made.is_none(), name.is_empty(), "no attack {name:?}");
    // What the disk is asked for: of no file, so each is refused by the kernel, not by the filter.
    for kind in [libc::FALLOC_FL_PUNCH_HOLE, libc::FALLOC_FL_ZERO_RANGE] {
        let mode = kind | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: its arguments are numbers.
        let result = unsafe { libc::syscall(libc::SYS_fallocate, -1, mode, CAPACITY, CAPACITY) };
        assert_eq!(result, -1);
    }
    // Heap, as the loop's.
    let memory: Vec<u8> = vec![1; 1 << 20];
    assert_eq!(memory.iter().filter(|byte| **byte == 1).count(), 1 << 20);
    // The end of a test makes other calls than that of a worker.
    // SAFETY: ends this process.
    unsafe { libc::_exit(0) }
}
