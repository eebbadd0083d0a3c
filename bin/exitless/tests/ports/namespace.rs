//! Network namespaces of threads.

use std::fs;
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

/// Moves this thread into a network namespace of its own; says why not where there can be none.
fn enter() -> bool {
    // SAFETY: changes the namespace of this thread alone.
    let is_own = unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0;
    let reason = match (is_own, fs::File::open("/dev/net/tun")) {
        (true, Ok(_)) if ip("link set lo up") => return true,
        (false, _) => "no network namespace, which takes root".to_owned(),
        (true, Err(error)) => format!("/dev/net/tun: {error}"),
        (true, Ok(_)) => "no ip command (iproute2)".to_owned(),
    };
    println!("skipped: {reason}");
    false
}

/// Runs `test` in a network namespace of its own.
pub fn in_one(test: impl FnOnce() + Send) {
    let outcome = thread::scope(|scope| {
        let thread = scope.spawn(|| {
            if enter() {
                test();
            }
        });
        thread.join()
    });
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

/// `ip` with these arguments, in this thread's namespace.
pub fn ip(line: &str) -> bool {
    let output = Command::new("ip").args(line.split(' ')).output();
    let is_done = output.as_ref().is_ok_and(|output| output.status.success());
    if !is_done {
        println!("ip {line}: {output:?}");
    }
    is_done
}

/// A TAP interface without frames of its own.
pub fn tap(name: &str, options: &str) {
    assert!(ip(&format!("tuntap add dev {name} mode tap{options}")));
    up(name);
}

/// Takes an interface up, without frames of its own.
pub fn up(name: &str) {
    // A kernel without IPv6 has nothing to say by itself.
    if std::path::Path::new("/proc/sys/net/ipv6").exists() {
        assert!(ip(&format!("link set dev {name} addrgenmode none")));
    }
    assert!(ip(&format!("link set dev {name} up")));
}

/// Frames that an interface of this thread's namespace has received: of a TAP, those that were
/// written to it.
pub fn received(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/thread-self/net/dev").expect("the kernel's");
    let line = text.lines().find_map(|line| {
        let (of, rest) = line.split_once(':')?;
        (of.trim() == name).then_some(rest)
    });
    let packets = line.expect("it is there").split_whitespace().nth(1);
    packets.expect("a number").parse().expect("a number")
}

/// Another network namespace, with a thread in it.
pub struct Other {
    thread: libc::pid_t,
    jobs: Sender<Job>,
}

type Job = Box<dyn FnOnce() + Send>;

impl Other {
    /// A fresh one, gone with this value.
    pub fn new() -> Self {
        let (jobs, asked): (_, Receiver<Job>) = channel();
        let (tell, told) = channel();
        thread::spawn(move || {
            assert!(enter(), "a second namespace");
            // SAFETY: asks for a number.
            tell.send(unsafe { libc::gettid() }).expect("a test");
            for job in asked {
                job();
            }
        });
        let thread = told.recv().expect("a thread");
        Self { thread, jobs }
    }

    /// Moves an interface of the caller's namespace there.
    pub fn take(&self, interface: &str) {
        assert!(ip(&format!(
            "link set dev {interface} netns {}",
            self.thread
        )));
    }

    /// Begins `job` there; what it answers comes by the channel.
    pub fn begin<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Receiver<T> {
        let (tell, answer) = channel();
        let job = move || {
            // A test that has ended does not listen.
            let _ = tell.send(job());
        };
        self.jobs.send(Box::new(job)).expect("its thread");
        answer
    }

    /// Does `job` there.
    pub fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        self.begin(job).recv().expect("no panic there")
    }
}
