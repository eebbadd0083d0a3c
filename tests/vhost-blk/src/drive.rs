//! The measuring loop: one thread, any number of disks, closed or open loop, polling or sleeping.
//!
//! A *visit* to a ring takes at most [`REAP`] completions and replaces them, so that a client with
//! many disks does not even out a server that serves them unevenly. A ring is *awake* (visited each
//! round, calls off) or *asleep* (a call asked for); polling rings never sleep. When all sleep, so
//! does the thread, until a call, the next intended time, or a look at the watch: every 100 ms each
//! ring is checked for a request without an answer for 500 ms. That is a lost wake-up, on one side
//! or the other; it is counted, whether in the warm-up, while measuring or at the end, and the ring
//! kicked so that the run goes on.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use report::clock::Clock;
use rustix::event::{Timespec, epoll};

use crate::client::{Client, ClientError, Options};
use crate::hist::Histogram;
use crate::load::{Arrivals, Mix, Mode, Pacing, Requests, VmSpec};
use crate::process::{self, thread_cpu};
use crate::queue::{SECTOR, Status};
use crate::stats::{Errors, Latency, Report, VmReport, jain};
use seeded::Random;

/// Completions taken per ring and visit.
pub const REAP: usize = 4;
/// A request without an answer for so long has lost its wake-up.
pub const LOST_AFTER: Duration = Duration::from_millis(500);
const CHECK_EVERY: u64 = 100_000_000;
/// Before an intended time the thread is awake already: a timer's own latency is not the server's.
const WAKE_EARLY: u64 = 80_000;
/// Rounds over awake rings between two looks at the sleeping ones' calls.
const ROUNDS_PER_LOOK: u32 = 16;
/// Time for which the end waits for what is outstanding, nanoseconds.
const DRAIN: u64 = 2_000_000_000;
/// The cost of a request as Jain's index counts it, in nanoseconds: so much, and so much per byte.
const COST: (f64, f64) = (200.0, 0.1);

/// One run.
#[derive(Clone, Debug)]
pub struct Run {
    /// The disks.
    pub vms: Vec<VmSpec>,
    /// Options of connections; depth and block are each disk's own.
    pub options: Options,
    /// Kinds of requests.
    pub mix: Mix,
    /// Only the first sectors of a disk; `None`: all.
    pub sectors: Option<u64>,
    /// Way in which completions are noticed.
    pub mode: Mode,
    /// Before anything is counted.
    pub warm_up: Duration,
    /// Time that is measured.
    pub measure: Duration,
    /// For random numbers.
    pub seed: u64,
    /// The server's process, to report its processor time.
    pub server: Option<u32>,
}

/// Reason why a run ended without a result.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum RunError {
    #[error("{socket}")]
    Client {
        socket: String,
        #[source]
        source: ClientError,
    },
    #[error("{socket}: the back end closed the connection")]
    HungUp { socket: String },
    #[error("the disk of {socket} has {sectors} sectors, too few for one request")]
    TooSmall { socket: String, sectors: u64 },
    #[error("epoll or a clock failed")]
    System(#[from] io::Error),
}

/// A ring's part of the loop.
struct RingState {
    vm: usize,
    queue: usize,
    arrivals: Arrivals,
    requests: Requests,
    is_awake: bool,
    /// Time of the last completion, or of the last submission to an idle ring.
    progress: u64,
}

/// A disk's part.
struct Vm {
    client: Client,
    is_closed: bool,
    latency: Histogram,
    after_step: Histogram,
    /// Latencies of flushes alone.
    flushes: Histogram,
    done: u64,
    bytes: u64,
    errors: Errors,
    lost: u64,
}

struct Driver<'a> {
    run: &'a Run,
    clock: Clock,
    random: Random,
    vms: Vec<Vm>,
    rings: Vec<RingState>,
    awake: Vec<usize>,
    epoll: OwnedFd,
    step_at: u64,
    is_counting: bool,
    lost_calls: u64,
    sleeps: u64,
}

/// Connects to all disks of a run, loads them, and reports.
///
/// # Errors
/// A server is not there, refuses, breaks the protocol or goes away.
pub fn drive(run: &Run) -> Result<Report, RunError> {
    connect(run)?.go()
}

/// Connects to all disks; all rings are empty and awake.
fn connect(run: &Run) -> Result<Driver<'_>, RunError> {
    // Sleeps end when they should, not up to 50 µs later.
    rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1))
        .map_err(io::Error::from)?;
    let clock = Clock::new();
    let mut vms = Vec::with_capacity(run.vms.len());
    for spec in &run.vms {
        let options = Options {
            depth: spec.depth,
            block: spec.block,
            ..run.options.clone()
        };
        let client = Client::connect(&spec.socket, options).map_err(|source| RunError::Client {
            socket: spec.socket.display().to_string(),
            source,
        })?;
        vms.push(Vm {
            client,
            is_closed: spec.pacing == Pacing::Closed,
            latency: Histogram::default(),
            after_step: Histogram::default(),
            flushes: Histogram::default(),
            done: 0,
            bytes: 0,
            errors: Errors::default(),
            lost: 0,
        });
    }
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io::Error::from)?;
    let mut driver = Driver {
        run,
        clock,
        random: Random::new(run.seed),
        vms,
        rings: Vec::new(),
        awake: Vec::new(),
        epoll,
        step_at: u64::MAX,
        is_counting: false,
        lost_calls: 0,
        sleeps: 0,
    };
    driver.prepare()?;
    Ok(driver)
}

impl Driver<'_> {
    fn prepare(&mut self) -> Result<(), RunError> {
        let start = self.clock.now();
        let warm_end = start + self.run.warm_up.as_nanos() as u64;
        let step_at = warm_end + self.run.measure.as_nanos() as u64 / 2;
        for (index, (vm, spec)) in self.vms.iter().zip(&self.run.vms).enumerate() {
            let sectors = self
                .run
                .sectors
                .unwrap_or(u64::MAX)
                .min(vm.client.config().capacity);
            if sectors < u64::from(spec.block / SECTOR) {
                let socket = spec.socket.display().to_string();
                return Err(RunError::TooSmall { socket, sectors });
            }
            if matches!(spec.pacing, Pacing::Step { .. }) {
                self.step_at = step_at;
            }
            for queue in 0..vm.client.queues.len() {
                let pacing = divide(spec.pacing, vm.client.queues.len());
                let at = self.random.below(sectors);
                let call = vm.client.queues[queue].call_fd();
                let token = epoll::EventData::new_u64(self.rings.len() as u64);
                epoll::add(&self.epoll, call, token, epoll::EventFlags::IN)
                    .map_err(io::Error::from)?;
                self.rings.push(RingState {
                    vm: index,
                    queue,
                    arrivals: Arrivals::new(pacing, start, step_at, &mut self.random),
                    requests: Requests::new(self.run.mix, spec.block, sectors, at),
                    is_awake: true,
                    progress: start,
                });
            }
        }
        self.awake = (0..self.rings.len()).collect();
        for ring in &self.rings {
            let client = &mut self.vms[ring.vm].client;
            client.queues[ring.queue].ring.disarm(&client.memory);
        }
        Ok(())
    }

    fn go(&mut self) -> Result<Report, RunError> {
        let start = self.clock.now();
        let mut begin = start + self.run.warm_up.as_nanos() as u64;
        let mut end = u64::MAX;
        let mut next_check = start + CHECK_EVERY;
        let (mut cpu, mut server_cpu) = (0, None);
        for ring in 0..self.rings.len() {
            self.refill(ring, start, usize::MAX);
        }
        loop {
            let now = self.clock.now();
            if !self.is_counting && now >= begin {
                self.start_counting();
                cpu = thread_cpu();
                server_cpu = self.run.server.and_then(process::cpu_time);
                begin = self.clock.now();
                end = begin + self.run.measure.as_nanos() as u64;
            }
            if now >= end {
                break;
            }
            if now >= next_check {
                self.check(now, now - next_check)?;
                next_check = now + CHECK_EVERY;
            }
            let deadline = if self.is_counting { end } else { begin }.min(next_check);
            match self.run.mode {
                Mode::Poll => {
                    for ring in 0..self.rings.len() {
                        self.visit(ring)?;
                    }
                }
                Mode::Event => self.round(0, deadline)?,
                Mode::Spin(spin) => self.round(spin.as_nanos() as u64, deadline)?,
            }
        }
        let elapsed = self.clock.now() - begin;
        let cpu = thread_cpu() - cpu;
        let server_cpu = self.run.server.and_then(process::cpu_time).zip(server_cpu);
        let mut report = self.report(elapsed, cpu);
        report.server_cpu = server_cpu
            .map(|(after, before)| after.saturating_sub(before).as_secs_f64() / report.seconds);
        self.finish(&mut report)?;
        Ok(report)
    }

    fn start_counting(&mut self) {
        self.is_counting = true;
        self.sleeps = 0;
        for vm in &mut self.vms {
            vm.latency.clear();
            vm.after_step.clear();
            vm.flushes.clear();
            (vm.done, vm.bytes) = (0, 0);
            for queue in &mut vm.client.queues {
                // Calls of the warm-up that a polling driver has not read. One that sleeps may be
                // about to be woken by them.
                if matches!(self.run.mode, Mode::Poll) {
                    queue.take_calls();
                }
                queue.notifiers.start_counting();
            }
        }
    }

    /// Takes what came back, at most [`REAP`], and asks for more. Whether there was anything.
    #[inline]
    fn visit(&mut self, index: usize) -> Result<bool, RunError> {
        let ring = &mut self.rings[index];
        let vm = &mut self.vms[ring.vm];
        let client = &mut vm.client;
        let queue = &mut client.queues[ring.queue];
        if !queue.ring.has_used(&client.memory) {
            if !vm.is_closed {
                let now = self.clock.now();
                if ring.arrivals.next() <= now {
                    self.refill(index, now, usize::MAX);
                }
            }
            return Ok(false);
        }
        let now = self.clock.now();
        let mut count = 0;
        while count < REAP {
            let done = queue.complete(&client.memory, &client.layout);
            let Some(done) = (match done {
                Ok(done) => done,
                Err(source) => return Err(ring_error(client.path(), ring.queue, source)),
            }) else {
                break;
            };
            queue.release(done.slot);
            let histogram = match done.since >= self.step_at {
                true => &mut vm.after_step,
                false => &mut vm.latency,
            };
            histogram.record(now.saturating_sub(done.since));
            if done.extent.bytes == 0 {
                vm.flushes.record(now.saturating_sub(done.since));
            }
            vm.done += 1;
            vm.bytes += u64::from(done.extent.bytes);
            match done.status {
                Status::Ok => {}
                Status::IoError => vm.errors.io += 1,
                Status::Unsupported => vm.errors.unsupported += 1,
                Status::Other(_) => vm.errors.other += 1,
            }
            count += 1;
        }
        ring.progress = now;
        self.refill(index, now, count);
        Ok(true)
    }

    /// Submits: in a closed loop `count` requests, in an open one all whose time has come, whatever
    /// came back.
    #[inline]
    fn refill(&mut self, index: usize, now: u64, count: usize) {
        let ring = &mut self.rings[index];
        let vm = &mut self.vms[ring.vm];
        let client = &mut vm.client;
        let queue = &mut client.queues[ring.queue];
        let was_idle = queue.outstanding() == 0;
        let count = if vm.is_closed { count } else { usize::MAX };
        for _ in 0..count {
            let since = match vm.is_closed {
                true => now,
                false if ring.arrivals.next() > now => break,
                false => ring.arrivals.next(),
            };
            let Some(slot) = queue.take_slot() else { break };
            let (op, extent) = ring.requests.next(&mut self.random);
            if !queue.submit(&client.memory, &client.layout, slot, op, extent, since) {
                queue.release(slot);
                break;
            }
            if !vm.is_closed {
                ring.arrivals.advance(&mut self.random);
            }
        }
        if was_idle {
            ring.progress = now;
        }
        queue.publish(&client.memory);
    }

    /// One round of a client that sleeps: what is due, what is awake, and sleep when nothing is,
    /// until `deadline` at most.
    fn round(&mut self, spin: u64, deadline: u64) -> Result<(), RunError> {
        let mut next = deadline;
        let now = self.clock.now();
        for index in 0..self.rings.len() {
            if self.vms[self.rings[index].vm].is_closed {
                continue;
            }
            if self.rings[index].arrivals.next() <= now {
                self.refill(index, now, usize::MAX);
            }
            // One that has no slot free waits for a completion.
            let at = self.rings[index].arrivals.next();
            if at > now {
                next = next.min(at.saturating_sub(WAKE_EARLY));
            }
        }
        if self.awake.is_empty() {
            let now = self.clock.now();
            if next > now {
                self.sleeps += 1;
                return self.take_events(next - now);
            }
            // Too close to an intended time to sleep: look only.
            return self.take_events(0);
        }
        for _ in 0..ROUNDS_PER_LOOK {
            let mut at = 0;
            while at < self.awake.len() {
                let index = self.awake[at];
                if self.visit(index)? || !self.may_sleep(index, spin) {
                    at += 1;
                } else {
                    self.rings[index].is_awake = false;
                    self.awake.swap_remove(at);
                }
            }
            if self.awake.is_empty() {
                return Ok(());
            }
        }
        if self.awake.len() < self.rings.len() {
            self.take_events(0)?;
        }
        Ok(())
    }

    /// Asks for a call if the ring has been silent for `spin`; `false` where it has to stay awake.
    fn may_sleep(&mut self, index: usize, spin: u64) -> bool {
        let ring = &self.rings[index];
        if spin > 0 && self.clock.now().saturating_sub(ring.progress) < spin {
            std::hint::spin_loop();
            return false;
        }
        let client = &mut self.vms[ring.vm].client;
        client.queues[ring.queue].ring.arm(&client.memory)
    }

    /// Waits for calls, `timeout` nanoseconds at most, and wakes their rings.
    fn take_events(&mut self, timeout: u64) -> Result<(), RunError> {
        let timeout = Timespec {
            tv_sec: (timeout / 1_000_000_000) as i64,
            tv_nsec: (timeout % 1_000_000_000) as i64,
        };
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 64];
        let (events, _) = match epoll::wait(&self.epoll, &mut events, Some(&timeout)) {
            Ok(events) => events,
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(errno) => return Err(io::Error::from(errno).into()),
        };
        for event in events {
            let index = event.data.u64() as usize;
            let ring = &self.rings[index];
            self.vms[ring.vm].client.queues[ring.queue].take_calls();
            self.wake(index);
        }
        Ok(())
    }

    fn wake(&mut self, index: usize) {
        let ring = &mut self.rings[index];
        if !ring.is_awake {
            ring.is_awake = true;
            self.awake.push(index);
            let client = &mut self.vms[ring.vm].client;
            client.queues[ring.queue].ring.disarm(&client.memory);
        }
    }

    /// Looks for lost wake-ups and for servers that went away, so many nanoseconds later than it
    /// should have.
    fn check(&mut self, now: u64, late: u64) -> Result<(), RunError> {
        for vm in &self.vms {
            if vm.client.is_hung_up() {
                let socket = vm.client.path().display().to_string();
                return Err(RunError::HungUp { socket });
            }
        }
        if late > CHECK_EVERY {
            // This thread did not run itself: an answer or a call may be there unread.
            for ring in &mut self.rings {
                ring.progress = now;
            }
        }
        for index in 0..self.rings.len() {
            let ring = &mut self.rings[index];
            let vm = &mut self.vms[ring.vm];
            let queue = &mut vm.client.queues[ring.queue];
            let silent = now.saturating_sub(ring.progress);
            if queue.outstanding() == 0 || u128::from(silent) < LOST_AFTER.as_nanos() {
                continue;
            }
            ring.progress = now;
            vm.lost += 1;
            if queue.ring.has_used(&vm.client.memory) {
                self.lost_calls += 1;
                self.wake(index);
            } else {
                queue.kick();
            }
        }
        Ok(())
    }

    fn report(&mut self, elapsed: u64, cpu: u64) -> Report {
        let seconds = elapsed as f64 / 1e9;
        let mut report = Report {
            seconds,
            client_cpu: cpu as f64 / elapsed as f64,
            sleeps: self.sleeps,
            lost_calls: self.lost_calls,
            ..Report::default()
        };
        let (mut latency, mut after_step) = (Histogram::default(), Histogram::default());
        let mut flushes = Histogram::default();
        let groups = self
            .run
            .vms
            .iter()
            .map(|spec| usize::from(spec.group) + 1)
            .max();
        let mut groups = vec![Histogram::default(); groups.unwrap_or(0)];
        for (vm, spec) in self.vms.iter_mut().zip(&self.run.vms) {
            for queue in &mut vm.client.queues {
                queue.take_calls();
                report.kicks += queue.notifiers.kicks;
                report.calls += queue.notifiers.calls;
            }
            latency.merge(&vm.latency);
            after_step.merge(&vm.after_step);
            flushes.merge(&vm.flushes);
            report.requests += vm.done;
            report.bytes_per_s += vm.bytes as f64 / seconds;
            report.errors.io += vm.errors.io;
            report.errors.unsupported += vm.errors.unsupported;
            report.errors.other += vm.errors.other;
            report.lost_wakeups += vm.lost;
            report.served += usize::from(vm.done > 0);
            vm.latency.merge(&vm.after_step);
            groups[usize::from(spec.group)].merge(&vm.latency);
            report.vms.push(VmReport {
                socket: spec.socket.display().to_string(),
                depth: spec.depth,
                block: spec.block,
                weight: spec.weight,
                iops: vm.done as f64 / seconds,
                cost_per_s: (vm.done as f64 * COST.0 + vm.bytes as f64 * COST.1) / seconds,
                latency: Latency::from(&vm.latency),
                errors: vm.errors,
                lost_wakeups: vm.lost,
            });
        }
        if self.step_at != u64::MAX {
            report.after_step = Some(Latency::from(&after_step));
            latency.merge(&after_step);
        }
        if self.run.mix.flush > 0 {
            report.flushes = Some(Latency::from(&flushes));
        }
        report.groups = groups.iter().map(Latency::from).collect();
        report.iops = report.requests as f64 / seconds;
        report.latency = Latency::from(&latency);
        let iops = || report.vms.iter().map(|vm| vm.iops);
        report.vm_min_iops = iops().fold(f64::INFINITY, f64::min);
        report.vm_max_iops = iops().fold(0.0, f64::max);
        report.jain = jain(report.vms.iter().map(|vm| vm.cost_per_s / vm.weight));
        report
    }

    /// Waits for what is outstanding, then stops the rings as a guest does.
    fn finish(&mut self, report: &mut Report) -> Result<(), RunError> {
        let until = self.clock.now() + DRAIN;
        loop {
            let (mut outstanding, mut stuck) = (0, 0);
            for (index, vm) in self.vms.iter_mut().enumerate() {
                let client = &mut vm.client;
                for queue in &mut client.queues {
                    while let Some(done) = queue
                        .complete(&client.memory, &client.layout)
                        .map_err(|source| ring_error(&self.run.vms[index].socket, 0, source))?
                    {
                        queue.release(done.slot);
                    }
                    outstanding += u64::from(queue.outstanding());
                    stuck += u64::from(queue.outstanding() > 0);
                }
            }
            if outstanding == 0 || self.clock.now() > until {
                report.unanswered = outstanding;
                report.lost_wakeups += stuck;
                break;
            }
            std::thread::yield_now();
        }
        for (vm, spec) in self.vms.iter_mut().zip(&self.run.vms) {
            let bases = vm.client.stop().map_err(|source| RunError::Client {
                socket: spec.socket.display().to_string(),
                source,
            })?;
            report.wrong_bases +=
                bases.iter().filter(|(theirs, ours)| theirs != ours).count() as u64;
        }
        Ok(())
    }
}

fn ring_error(path: &std::path::Path, queue: usize, source: crate::ring::RingError) -> RunError {
    RunError::Client {
        socket: path.display().to_string(),
        source: ClientError::Ring {
            queue: queue as u16,
            source,
        },
    }
}

/// A disk's rate, spread over its queues.
fn divide(pacing: Pacing, queues: usize) -> Pacing {
    let part = |rate: f64| rate / queues as f64;
    match pacing {
        Pacing::Closed => Pacing::Closed,
        Pacing::Poisson(rate) => Pacing::Poisson(part(rate)),
        Pacing::Uniform(rate) => Pacing::Uniform(part(rate)),
        Pacing::Burst {
            on_ns,
            off_ns,
            rate,
        } => Pacing::Burst {
            on_ns,
            off_ns,
            rate: part(rate),
        },
        Pacing::Step { from, to } => Pacing::Step {
            from: part(from),
            to: part(to),
        },
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::ceiling;

    /// A run at depth 8 against the server that does nothing.
    fn with_run(pacing: Pacing, test: impl FnOnce(&Run)) {
        let directory = TempDir::new().unwrap();
        let socket = directory.path().join("s");
        let _server = ceiling::serve(&socket, None, true).unwrap();
        test(&Run {
            vms: vec![VmSpec {
                pacing,
                ..VmSpec::closed(socket, 8, 4096)
            }],
            options: Options::new(8, 4096),
            mix: Mix::READS,
            sectors: None,
            mode: Mode::Poll,
            warm_up: Duration::ZERO,
            measure: Duration::from_millis(10),
            seed: 1,
            server: None,
        });
    }

    #[test]
    fn silence_while_the_client_itself_was_stopped_is_not_the_servers() {
        let second = 1_000_000_000;
        for (late, lost) in [(second, 0), (0, 1)] {
            with_run(Pacing::Closed, |run| {
                let mut driver = connect(run).unwrap();
                let now = driver.clock.now();
                driver.refill(0, now, 1);
                driver.check(now + second, late).unwrap();
                assert_eq!(driver.vms[0].lost, lost);
            });
        }
    }

    #[test]
    fn an_open_loop_submits_all_that_is_due_however_little_came_back() {
        // Due every nanosecond: all eight slots are filled at once.
        with_run(Pacing::Uniform(1e9), |run| {
            let mut driver = connect(run).unwrap();
            driver.refill(0, driver.clock.now(), 1);
            assert_eq!(driver.vms[0].client.queues[0].free_slots(), 0);
        });
        with_run(Pacing::Closed, |run| {
            let mut driver = connect(run).unwrap();
            driver.refill(0, driver.clock.now(), 1);
            assert_eq!(driver.vms[0].client.queues[0].free_slots(), 7);
        });
    }
}
