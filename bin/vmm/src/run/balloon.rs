//! `--balloon`: memory that the guest is asked to give up. The request, checked; its thread.
//!
//! The device is a function like the others, under a unit of its own that translates nothing:
//! Linux's driver knows no IOMMU. The memory handles the pages that the guest gives
//! ([`Memory::balloon`](super::memory::Memory::balloon)).
//!
//! One thread beside the owner asks the guest for statistics and, under `target=auto`, sets the
//! target ([`auto`], from what [`host`] sees); another follows the file from which a new target is
//! read.

mod auto;
mod host;

use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use guest_mem::{GuestRam, PAGE_SIZE, PhysMem};
use machine::Request;
use vio::balloon::{Balloon, BalloonConfig, BalloonIo, Statistics};

use self::auto::GuestMemory;
use super::args::RunArgs;
use super::composed::{Functions, Owner};
use super::file_watch::follow;
use super::memory::{AskPager, OwnerHandle};
use crate::values::keys::Keys;
use crate::values::size;

/// Name of the file from which a new target is read, in messages.
const FILE: &str = "--balloon: file";

/// A checked request.
#[derive(Debug)]
pub struct BalloonSpec {
    target: Target,
    limits: Limits,
    /// Where a new target is read from.
    file: Option<PathBuf>,
    deflate_on_oom: bool,
    reporting: bool,
    /// Between two questions for statistics.
    period: Duration,
}

/// Size of the balloon.
#[derive(Clone, Copy, Debug)]
enum Target {
    /// So many pages.
    Pages(u32),
    /// A number that is decided each time.
    Auto,
}

/// Bounds of a balloon's size.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// Bytes that it has.
    memory: u64,
    /// Bytes that it keeps at least.
    least: u64,
}

impl Limits {
    /// Returns the pages that it is to give up.
    fn pages(self, text: &str) -> Result<u32> {
        let bytes = size::bytes(text)?;
        let most = self.memory - self.least;
        if bytes > most {
            bail!(
                "{text} of {} MiB: a guest keeps {} MiB at least, so {} MiB are the most it can do \
                 without",
                self.memory >> 20,
                self.least >> 20,
                most >> 20
            );
        }
        u32::try_from(bytes / PAGE_SIZE)
            .with_context(|| format!("{text} is more than a balloon holds"))
    }
}

impl Limits {
    /// Returns a guest that is asked for `target` pages, has given `actual`, and says that so many
    /// bytes are available.
    fn guest(self, target: u32, actual: u32, available: Option<u64>) -> GuestMemory {
        let pages = |bytes: u64| u32::try_from(bytes / PAGE_SIZE).unwrap_or(u32::MAX);
        GuestMemory {
            memory: pages(self.memory),
            most: pages(self.memory - self.least),
            target,
            actual,
            available: available.map(|bytes| bytes / PAGE_SIZE),
        }
    }
}

impl BalloonSpec {
    /// Checks `--balloon` of a machine with so much memory, of which a guest keeps `least`.
    ///
    /// # Errors
    /// Options that do not go together, or a text that is no size.
    pub fn check(args: &RunArgs, memory: u64, least: u64) -> Result<Option<Self>> {
        let Some(text) = &args.balloon else {
            return Ok(None);
        };
        if !(1..=3_600_000).contains(&args.balloon_period) {
            bail!(
                "--balloon-period is 1 to 3600000 ms, not {}",
                args.balloon_period
            );
        }
        let limits = Limits { memory, least };
        let mut keys = Keys::parse("--balloon", text)?;
        let target = keys.take("target").unwrap_or("0");
        let target = match target {
            "auto" => Target::Auto,
            text => Target::Pages(limits.pages(text).context("--balloon: target")?),
        };
        let file = match keys.take("file") {
            Some("") => bail!("{FILE} is empty: name the file that a new target is read from"),
            file => file.map(PathBuf::from),
        };
        if let (Target::Auto, Some(file)) = (target, &file) {
            bail!(
                "--balloon: target=auto finds the size itself: leave file={} out",
                file.display()
            );
        }
        let deflate_on_oom = keys.take_switch("deflate-on-oom", true)?;
        let reporting = keys.take_switch("reporting", true)?;
        keys.finish()?;
        Ok(Some(Self {
            target,
            limits,
            file,
            deflate_on_oom,
            reporting,
            period: Duration::from_millis(args.balloon_period),
        }))
    }

    /// Returns the device of a guest with this memory, whose pages go to `io`.
    pub fn device(&self, ram: &GuestRam, io: Box<dyn BalloonIo>) -> Result<Balloon> {
        let regions: Vec<_> = ram.regions().iter().map(|r| (r.gpa, r.len)).collect();
        let config = BalloonConfig {
            deflate_on_oom: self.deflate_on_oom,
            reporting: self.reporting,
            access_platform: false,
            ..BalloonConfig::default()
        };
        let mut balloon = Balloon::new(config, &regions, io)?;
        if let Target::Pages(pages) = self.target {
            balloon.set_target(pages);
        }
        Ok(balloon)
    }

    /// Starts the thread beside the owner of the balloon `watched`. `pager` is that of its memory,
    /// if it has one.
    pub fn start<F, M>(
        self,
        owner: OwnerHandle<F, M>,
        watched: &BalloonWatch,
        pager: Option<AskPager>,
    ) -> Result<BalloonTask>
    where
        F: Functions,
        M: PhysMem + Send + 'static,
    {
        let number = watched.number;
        let handle = BalloonHandle { owner, number };
        let Self {
            target,
            limits,
            file,
            period,
            ..
        } = self;
        if let Some(file) = file {
            let handle = handle.clone();
            follow(FILE, file, move |text| {
                let pages = limits.pages(text)?;
                let told = handle.with(move |balloon| balloon.set_target(pages));
                told.ok_or_else(|| anyhow!("the machine has ended"))
            })?;
        }
        let (stop, stopped) = channel::<()>();
        let watched = watched.clone();
        let ask = move || {
            let mut read_at = 0;
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(period) {
                let watched = watched.clone();
                let look = move |balloon: &mut Balloon| {
                    let said = watched.said(balloon);
                    // Of a guest without statistics nothing comes.
                    balloon.request_statistics();
                    (balloon.target(), said)
                };
                let Some((now, said)) = handle.with(look) else {
                    break;
                };
                // Figures that have been read before do not count the pages given since.
                let is_new = std::mem::replace(&mut read_at, said.statistics.read_at_ns)
                    != said.statistics.read_at_ns;
                let Target::Auto = target else {
                    continue;
                };
                let Some(host) = host::look(pager.as_ref()) else {
                    continue;
                };
                let available = said.statistics.available.filter(|_| is_new);
                let wanted = auto::decide(&host, &limits.guest(now, said.actual, available));
                if wanted != now
                    && handle
                        .with(move |balloon| balloon.set_target(wanted))
                        .is_none()
                {
                    break;
                }
            }
        };
        let thread = std::thread::Builder::new().name("balloon".into());
        Ok(BalloonTask {
            stop,
            thread: thread.spawn(ask).context("the balloon's thread")?,
        })
    }
}

/// A balloon by its number among the owner's functions, and the last figures of its guest: a driver
/// that leaves, as when the guest powers off, leaves none behind.
#[derive(Clone, Debug)]
pub struct BalloonWatch {
    number: usize,
    last: Arc<Mutex<BalloonStatus>>,
}

/// Figures of a guest about its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BalloonStatus {
    /// Pages in the balloon.
    pub actual: u32,
    /// As far as it gives statistics.
    pub statistics: Statistics,
}

impl BalloonWatch {
    /// Names function number `number`.
    pub fn new(number: usize) -> Self {
        Self {
            number,
            last: Arc::default(),
        }
    }

    /// Returns the balloon, on its owner's thread.
    pub fn balloon<'a, F: Functions, M: PhysMem>(
        &self,
        owner: &'a mut Owner<F, M>,
    ) -> Option<&'a mut Balloon> {
        balloon_of(owner, self.number)
    }

    /// Returns the guest's figures, or the last ones if its driver has left.
    pub fn said(&self, balloon: &Balloon) -> BalloonStatus {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let now = BalloonStatus {
            actual: balloon.actual(),
            statistics: balloon.statistics().copied().unwrap_or_default(),
        };
        if balloon.is_live() {
            *last = now;
        }
        *last
    }
}

/// Thread of a balloon, beside the owner.
pub struct BalloonTask {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl BalloonTask {
    /// Ends it, before the owner.
    pub fn stop(self) {
        drop(self.stop);
        // A panic has been printed by its hook.
        let _ = self.thread.join();
    }
}

/// The balloon as other threads reach it.
struct BalloonHandle<F, M> {
    owner: OwnerHandle<F, M>,
    number: usize,
}

impl<F, M> Clone for BalloonHandle<F, M> {
    fn clone(&self) -> Self {
        Self {
            owner: self.owner.clone(),
            number: self.number,
        }
    }
}

impl<F: Functions, M: PhysMem + Send + 'static> BalloonHandle<F, M> {
    /// Returns the answer of `ask` on the owner's thread; `None` once that has ended.
    fn with<R: Send + 'static>(
        &self,
        ask: impl FnOnce(&mut Balloon) -> R + Send + 'static,
    ) -> Option<R> {
        let number = self.number;
        let question = move |owner: &mut Owner<F, M>| balloon_of(owner, number).map(ask);
        let answer = self.owner.call(|reply| Request::ask(reply, question));
        answer.ok().flatten()
    }
}

/// Returns the balloon that is function `number` of `owner`.
fn balloon_of<F: Functions, M: PhysMem>(
    owner: &mut Owner<F, M>,
    number: usize,
) -> Option<&mut Balloon> {
    owner.function(number)?.balloon()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_keeps_what_it_needs() {
        let limits = Limits {
            memory: 256 << 20,
            least: 64 << 20,
        };
        assert_eq!(limits.pages("0").expect("nothing"), 0);
        assert_eq!(limits.pages("192M").expect("all but the least"), 192 << 8);
        assert_eq!(limits.pages("8191").expect("whole pages"), 1);
        for text in ["193M", "99999G", "much", ""] {
            limits.pages(text).expect_err(text);
        }
    }
}
