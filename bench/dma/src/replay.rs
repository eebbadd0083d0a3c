//! `--replay`: traces of a guest's DMA calls (`make bench-pviommu`), replayed by the policies'
//! models; compares the requests that these remove with those that the guest's driver removed of
//! the same calls.
//!
//! A trace says at its head which policy its guest had and how many requests its host counted in
//! each window. Its calls are replayed from the guest's boot on, each endpoint by itself, as its
//! driver keeps them apart. Without reuse each call is a request: what is removed is relative to
//! that, in the same window.
//!
//! The models are the mapper's own sharing table and optimistic cache, and the reverse translation
//! cache of `dma-peers`, whose lifetimes begin with the first release here as in the driver. Live
//! mappings are found in all of them.
//!
//! Which mappings are removed is the models' answer; how many requests that takes is counted as the
//! driver sends them: what its worker finds at one of its turns (`residency_ms / 8` or a cycle's
//! eighth apart, a second at most), or what is evicted together, is removed together, in batches,
//! and mappings whose I/O virtual addresses follow each other share one UNMAP. The addresses are
//! those of the trace.
//!
//! Of the trace without reuse there are two things more, as in PVIOMMU's Table 5 and Tables 6 to 8:
//! how often a page is used in each window, and what the reverse translation cache and its tree
//! cost for each mapping of the whole trace.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use address::{PAGE_SHIFT, PhysAddr};
use anyhow::{Context, Result, anyhow, bail, ensure};
use dma_peers::RtcCache;
use dma_peers::reuse::{Batch, Key, OptimisticCache, Progress, Released, ReuseCache, SharingTable};
use dma_trace::calls::{Calls, Step};
use dma_trace::{Action, Event};
use iova::{Access, IovaPfn, IovaRange};
use report::Object;

/// Nanoseconds of a millisecond.
const MS: u64 = 1_000_000;
/// Live mappings that are found: more than any endpoint has.
const LIVE: usize = 1 << 16;
/// Mappings that the driver's worker removes together (`EXI_EXPIRE_BATCH`), and that one UNMAP
/// covers (`EXI_RANGE_MAX`).
const BATCH: usize = 256;
/// The longest time between two turns of the worker.
const TURN_MAX_NS: u64 = 1_000_000_000;
/// A tick of the guest's clock, Debian's: no time of the driver's is shorter.
const TICK_NS: u64 = 4_000_000;

/// A policy of the driver, with its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Nothing is found again.
    None,
    /// Live mappings are.
    Shared,
    /// Idle ones too.
    Optimistic {
        /// Idle mappings of an endpoint.
        quota: usize,
        /// Longest time that one is idle, milliseconds.
        residency_ms: u64,
    },
    /// Idle ones too, for so long after their first release.
    Rtc {
        /// Length of a cycle, milliseconds.
        ttl_ms: u64,
        /// Cycles after that of the first release.
        cycles: u64,
    },
}

impl Policy {
    /// Reads the driver's parameters, `name=value` each; one that is not named has the driver's
    /// default.
    fn parse(parameters: &str) -> Result<Self> {
        let value = |name: &str| {
            let mut pairs = parameters.split_whitespace();
            pairs.find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
        };
        let number = |name: &str, default: u64| match value(name) {
            Some(text) => text.parse().with_context(|| format!("{name}={text}")),
            None => Ok(default),
        };
        Ok(match value("reuse").unwrap_or("none") {
            "none" => Self::None,
            "shared" => Self::Shared,
            "optimistic" => Self::Optimistic {
                quota: usize::try_from(number("quota", 4096)?)?,
                residency_ms: number("residency_ms", 10_000)?,
            },
            "rtc" => Self::Rtc {
                ttl_ms: number("ttl_ms", 10_000)?,
                cycles: number("cycles", 3)?,
            },
            other => bail!("reuse={other} has no model"),
        })
    }

    /// Time between two turns of the driver's worker, nanoseconds; `None` where nothing expires.
    fn turn_ns(self) -> Option<u64> {
        let of = match self {
            Self::None | Self::Shared => return None,
            Self::Optimistic { residency_ms, .. } => residency_ms,
            Self::Rtc { ttl_ms, .. } => ttl_ms,
        };
        Some((of * MS / 8).clamp(TICK_NS, TURN_MAX_NS))
    }

    fn cache(self) -> Option<Box<dyn ReuseCache>> {
        match self {
            Self::None | Self::Shared => None,
            Self::Optimistic {
                quota,
                residency_ms,
            } => {
                // The driver removes the mappings that would be too old at its worker's next turn;
                // the model's owner releases a mapping after three quarters of the age that its
                // cache is made with.
                let whole = residency_ms * MS;
                let released = whole - self.turn_ns().unwrap_or(0).min(whole);
                let cache = OptimisticCache::new(quota, released / 3 * 4);
                Some(Box::new(cache))
            }
            Self::Rtc { ttl_ms, cycles } => {
                Some(Box::new(RtcCache::from_first_release(ttl_ms * MS, cycles)))
            }
        }
    }
}

/// Returns the key by which the models find a mapping.
fn key_of(event: Event) -> Result<Key> {
    let access = match event.access {
        dma_trace::Access::Read => Access::Read,
        dma_trace::Access::Write => Access::Write,
        dma_trace::Access::Both => Access::ReadWrite,
    };
    let start = PhysAddr::new(event.pfn << PAGE_SHIFT);
    let key = Key::new(start, u64::from(event.pages), access);
    key.with_context(|| format!("no model keeps {event:?}"))
}

/// One endpoint under a policy.
struct Endpoint {
    sharing: Option<Arc<SharingTable>>,
    cache: Option<Box<dyn ReuseCache>>,
    batch: Batch,
    /// Live mappings, by the address that the guest's device received: as many of the model's
    /// mappings as it has uses.
    live: HashMap<u64, Vec<(Key, IovaRange)>>,
    /// The driver's page of I/O virtual addresses for each of the model's mappings, by the model's
    /// range.
    iovas: HashMap<IovaRange, u64>,
    fresh: u64,
    /// Time between two turns of the worker.
    turn_ns: Option<u64>,
    /// Time of its next turn, while anything can expire.
    next_ns: Option<u64>,
    requests: u64,
}

impl Endpoint {
    fn new(policy: Policy) -> Self {
        Self {
            sharing: (policy != Policy::None).then(|| SharingTable::new(LIVE, 1)),
            cache: policy.cache(),
            batch: Batch::with_room(BATCH),
            live: HashMap::new(),
            iovas: HashMap::new(),
            fresh: 1 << 24,
            turn_ns: policy.turn_ns(),
            next_ns: None,
            requests: 0,
        }
    }

    /// A mapping for `key`, found or made by a request: the driver had it at `iova`.
    fn map(&mut self, key: Key, iova: u64, now_ns: u64) -> Result<IovaRange> {
        let live = self.sharing.as_ref();
        if let Some(range) = live.and_then(|sharing| SharingTable::acquire(sharing, key)) {
            return Ok(range);
        }
        let idle = self.cache.as_mut();
        let range = match idle.and_then(|cache| cache.acquire(key, now_ns)) {
            Some(range) => range,
            None => {
                self.requests += 1;
                let range = IovaRange::new(IovaPfn::new(self.fresh), key.pages());
                self.fresh += key.pages();
                let range = range.context("more addresses than there are")?;
                self.iovas.insert(range, iova);
                if let Some(cache) = &mut self.cache {
                    cache.insert(key, range, now_ns);
                }
                range
            }
        };
        if let Some(sharing) = &self.sharing {
            SharingTable::insert(sharing, key, range);
        }
        Ok(range)
    }

    fn unmap(&mut self, key: Key, range: IovaRange, now_ns: u64) {
        if (self.sharing.as_ref()).is_some_and(|sharing| sharing.end_use(key, range)) {
            return;
        }
        let is_kept = match &mut self.cache {
            Some(cache) => matches!(
                cache.release(key, range, now_ns, &mut self.batch),
                Released::Kept
            ),
            None => false,
        };
        if !is_kept {
            self.requests += 1;
            self.iovas.remove(&range);
        } else if self.next_ns.is_none() {
            self.next_ns = self.turn_ns.map(|turn_ns| now_ns + turn_ns);
        }
        self.tear_down(now_ns);
    }

    /// A request for each run of mappings of the batch whose addresses follow each other.
    fn tear_down(&mut self, now_ns: u64) {
        let gone = self.batch.entries().iter();
        let iovas = &mut self.iovas;
        let spans = gone.map(|gone| {
            let iova = iovas.remove(&gone.range);
            let iova = iova.expect("`map` has noted the address of each");
            (iova, span_of(gone.range))
        });
        self.requests += unmaps(spans.collect());
        if let Some(cache) = &mut self.cache {
            cache.torn_down(&mut self.batch, now_ns);
        }
    }

    /// The worker's turns until now.
    fn expire(&mut self, now_ns: u64) {
        while let Some((at_ns, turn_ns)) = self.next_ns.zip(self.turn_ns)
            && at_ns <= now_ns
            && let Some(cache) = &mut self.cache
        {
            if cache.expire(at_ns, &mut self.batch) == Progress::Done {
                let left = cache.counts().stale > self.batch.entries().len() as u64;
                self.next_ns = left.then_some(at_ns + turn_ns);
            }
            self.tear_down(at_ns);
        }
    }

    fn step(&mut self, event: Event, iova: u64, now_ns: u64) -> Result<()> {
        match event.action {
            Action::Map => {
                let key = key_of(event)?;
                let range = self.map(key, iova, now_ns)?;
                self.live.entry(iova).or_default().push((key, range));
            }
            Action::Unmap => {
                let of = self.live.get_mut(&iova).and_then(Vec::pop);
                let (key, range) = of.context("unmaps what is not mapped")?;
                self.unmap(key, range, now_ns);
            }
        }
        Ok(())
    }
}

/// Pages of addresses that the driver takes for a mapping: a power of two, unless it is large
/// (`EXI_SPAN_CACHED`).
fn span_of(range: IovaRange) -> u64 {
    match range.pages() {
        pages @ 0..32 => pages.next_power_of_two(),
        pages => pages,
    }
}

/// UNMAPs of mappings that are removed together, each with its first page of addresses and how many
/// it takes.
fn unmaps(mut spans: Vec<(u64, u64)>) -> u64 {
    spans.sort_unstable();
    let runs = spans.chunk_by(|(start, pages), (next, _)| start + pages == *next);
    runs.count() as u64
}

/// Requests of each window under a policy.
fn replay(calls: &Calls, windows: &[Range<usize>], policy: Policy) -> Result<Vec<u64>> {
    let mut endpoints: Vec<_> = calls
        .devices
        .iter()
        .map(|_| Endpoint::new(policy))
        .collect();
    let mut coherent = 0;
    // Requests before each step, and all.
    let mut sums = Vec::with_capacity(calls.steps.len() + 1);
    let sum = |endpoints: &[Endpoint], coherent: u64| {
        coherent + endpoints.iter().map(|one| one.requests).sum::<u64>()
    };
    for (time_us, step) in &calls.steps {
        let now_ns = time_us * 1000;
        endpoints.iter_mut().for_each(|one| one.expire(now_ns));
        sums.push(sum(&endpoints, coherent));
        match *step {
            Step::Streaming {
                device,
                event,
                iova,
            } => endpoints[device].step(event, iova, now_ns)?,
            Step::Coherent => coherent += 1,
            Step::Marker(_) => {}
        }
    }
    sums.push(sum(&endpoints, coherent));
    let windows = windows.iter();
    Ok(windows
        .map(|window| sums[window.end] - sums[window.start])
        .collect())
}

/// A window of a trace, as its driver was counted and as the model has it.
struct Compared {
    name: String,
    /// Percent of the calls that were no request: of the driver, and of the model.
    removed: [f64; 2],
}

impl Compared {
    fn points(&self) -> f64 {
        let [measured, modelled] = self.removed;
        (measured - modelled).abs()
    }
}

/// Reads a trace.
fn parse(text: &str) -> Result<Calls> {
    Calls::parse(text).map_err(|reason| anyhow!(reason))
}

/// Compares one trace.
fn compare(calls: &Calls) -> Result<Vec<Compared>> {
    let policy = calls.values("policy").next().context("it has no policy")?;
    let policy = Policy::parse(policy)?;
    let windows = calls.windows().map_err(|reason| anyhow!(reason))?;
    let counted: Vec<&str> = calls.values("window").collect();
    ensure!(
        windows.len() == counted.len() && !windows.is_empty(),
        "{} windows, of which {} were counted",
        windows.len(),
        counted.len()
    );
    let without = replay(calls, &windows, Policy::None)?;
    let with = replay(calls, &windows, policy)?;
    let mut compared = Vec::new();
    for ((counted, without), with) in counted.into_iter().zip(without).zip(with) {
        let (name, requests) = counted.split_once(' ').context("a window has no count")?;
        let requests: u64 = requests.parse().context("a window's requests")?;
        ensure!(without > 0, "no calls in the window {name}");
        let removed = |requests: u64| 100.0 * (1.0 - requests as f64 / without as f64);
        compared.push(Compared {
            name: name.to_owned(),
            removed: [requests, with].map(removed),
        });
    }
    Ok(compared)
}

/// Sets how often pages are used in each window: mappings made, distinct pages, uses of a page.
fn uses(calls: &Calls, object: &mut Object) -> Result<()> {
    let windows = calls.windows().map_err(|reason| anyhow!(reason))?;
    println!(
        "\nuses of pages\n  {:<14}{:>10}{:>16}{:>14}",
        "", "creates", "distinct pages", "uses a page"
    );
    for (window, counted) in windows.into_iter().zip(calls.values("window")) {
        let (name, _) = counted.split_once(' ').context("a window has no count")?;
        let (mut creates, mut uses, mut pages) = (0_u32, 0_u32, HashSet::new());
        for event in calls.pages(window).events {
            if event.action == Action::Map {
                creates += 1;
                uses += event.pages;
                pages.extend(event.pfn..event.pfn + u64::from(event.pages));
            }
        }
        let a_page = f64::from(uses) / pages.len().max(1) as f64;
        println!("  {name:<14}{creates:>10}{:>16}{a_page:>14.1}", pages.len());
        object.number(&format!("{name}_creates"), creates.into());
        object.number(&format!("{name}_distinct_pages"), pages.len() as f64);
        object.number(&format!("{name}_uses_per_page"), report::round(a_page, 1));
    }
    Ok(())
}

/// Bytes that a mapping costs in the reverse translation cache, and in its tree alone: all mappings
/// of the trace, none of them torn down.
fn bytes(calls: &Calls) -> Result<[f64; 2]> {
    let caches = calls.devices.iter().map(|_| RtcCache::new(u64::MAX));
    let mut caches: Vec<_> = caches.collect();
    let (mut batch, mut fresh) = (Batch::with_room(BATCH), 1 << 24);
    for (_, step) in &calls.steps {
        if let Step::Streaming { device, event, .. } = *step
            && event.action == Action::Map
        {
            let (cache, key) = (&mut caches[device], key_of(event)?);
            let range = cache.acquire(key, 0).or_else(|| {
                fresh += key.pages();
                IovaRange::new(IovaPfn::new(fresh), key.pages())
            });
            let range = range.context("more addresses than there are")?;
            cache.insert(key, range, 0);
            let _ = cache.release(key, range, 0, &mut batch);
        }
    }
    let sum = |of: fn(&RtcCache) -> u64| caches.iter().map(of).sum::<u64>() as f64;
    let entries = sum(|cache| cache.counts().entries);
    let whole = sum(|cache| cache.counts().bytes as u64);
    let tree = sum(|cache| cache.tree_bytes() as u64);
    Ok([whole / entries, tree / entries])
}

/// Replays the traces beside the figures in `report`, and adds keys to them.
///
/// # Errors
/// There are none, or one is damaged; the figures cannot be read or written.
pub fn run(report: &Path) -> Result<()> {
    let mut object = Object::read(report).with_context(|| report.display().to_string())?;
    let folder = report.with_extension("traces");
    let entries = fs::read_dir(&folder).with_context(|| folder.display().to_string())?;
    let mut files: Vec<_> = entries
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()?;
    files.sort();
    ensure!(!files.is_empty(), "{} has no traces", folder.display());
    println!(
        "removed of the calls of each window, percent\n  {:<16}{:<14}{:>10}{:>10}{:>9}",
        "", "", "counted", "model", "points"
    );
    let (mut worst, mut without) = (0_f64, None);
    for file in files {
        let named = || file.display().to_string();
        let row = file
            .file_stem()
            .and_then(|stem| stem.to_str())
            .with_context(named)?;
        let text = fs::read_to_string(&file).with_context(named)?;
        let calls = parse(&text).with_context(named)?;
        if calls.values("policy").any(str::is_empty) {
            without = Some(calls.clone());
        }
        for window in compare(&calls).with_context(named)? {
            let [measured, modelled] = window.removed;
            let name = &window.name;
            println!(
                "  {row:<16}{name:<14}{measured:>10.2}{modelled:>10.2}{:>9.2}",
                window.points()
            );
            for (key, value) in [("calls", measured), ("model", modelled)] {
                let key = format!("{row}_{name}_{key}_removed_percent");
                object.number(&key, report::round(value, 2));
            }
            worst = worst.max(window.points());
        }
    }
    object.number("policy_vs_model_points", report::round(worst, 2));
    println!("  policy_vs_model_points {worst:.2}");
    if let Some(calls) = &without {
        uses(calls, &mut object)?;
        let [whole, tree] = bytes(calls)?;
        println!(
            "\nbytes of a mapping: reverse translation cache {whole:.0}, its tree alone {tree:.0}"
        );
        object.number("rtc_bytes_per_mapping", report::round(whole, 1));
        object.number("rtc_tree_bytes_per_mapping", report::round(tree, 1));
    }
    object
        .write(report)
        .with_context(|| report.display().to_string())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A kernel that maps pages of one device for reading: `+page` and `-page` at a time in
    /// milliseconds, `[` and `]` for markers.
    fn trace(policy: &str, requests: u64, calls: &[(u64, &str)]) -> String {
        let mut text = format!("# exitless policy: {policy}\n# exitless window: w {requests}\n");
        for (ms, call) in calls {
            let event = match call.split_at(1) {
                ("+", page) => format!(
                    "dma_map_page: d dir=TO_DEVICE dma_addr=f{page}000 size=9 phys_addr={page}000 \
                     attrs="
                ),
                ("-", page) => {
                    format!("dma_unmap_page: d dir=TO_DEVICE dma_addr=f{page}000 size=9 attrs=")
                }
                ("[", _) => "tracing_mark_write: workload marker 1".into(),
                _ => "tracing_mark_write: workload marker 2".into(),
            };
            let (seconds, ms) = (ms / 1000, ms % 1000);
            text.push_str(&format!("x-1 [000] d..1. {seconds}.{ms:03}000: {event}\n"));
        }
        text
    }

    fn compared(policy: &str, requests: u64, calls: &[(u64, &str)]) -> Result<Vec<Compared>> {
        compare(&parse(&trace(policy, requests, calls))?)
    }

    fn removed(policy: &str, calls: &[(u64, &str)]) -> f64 {
        compared(policy, 0, calls).unwrap()[0].removed[1]
    }

    /// Page 1 twice in turn, and twice at once.
    const CALLS: [(u64, &str); 10] = [
        (1000, "["),
        (1000, "+1"),
        (1001, "-1"),
        (1002, "+1"),
        (1003, "+1"),
        (1004, "-1"),
        (1005, "-1"),
        (1006, "+2"),
        (1007, "-2"),
        (1008, "]"),
    ];

    #[test]
    fn each_policy_removes_what_it_finds() {
        assert_eq!(removed("reuse=none", &CALLS), 0.0);
        // 6 requests of 8 calls; and two MAPs.
        assert_eq!(removed("reuse=shared", &CALLS), 25.0);
        assert_eq!(removed("reuse=optimistic", &CALLS), 75.0);
        assert_eq!(removed("reuse=rtc", &CALLS), 75.0);
    }

    #[test]
    fn a_quota_and_lifetimes_are_kept() {
        let mut late = CALLS;
        for (ms, _) in &mut late[3..] {
            *ms += 5000;
        }
        let of = |policy: &str| removed(policy, &late);
        // Torn down once, mapped again.
        assert_eq!(of("reuse=optimistic residency_ms=2000"), 50.0);
        assert_eq!(of("reuse=optimistic residency_ms=60000"), 75.0);
        assert_eq!(of("reuse=rtc ttl_ms=1000 cycles=3"), 50.0);
        assert_eq!(of("reuse=rtc ttl_ms=1000 cycles=9"), 75.0);
        // 40 pages in turn, twice.
        let mut pages = vec!["[".to_owned()];
        for page in (0..80).map(|at| 10 + at % 40) {
            pages.extend([format!("+{page}"), format!("-{page}")]);
        }
        pages.push("]".into());
        let calls: Vec<_> = pages.iter().map(|call| (1000, call.as_str())).collect();
        assert_eq!(removed("reuse=optimistic quota=64", &calls), 75.0);
        // All but those that are kept at the end have gone before they come again.
        let small = removed("reuse=optimistic quota=8", &calls);
        assert!((0.0..=5.0).contains(&small), "{small}");
    }

    /// Eight pages that are mapped and unmapped at 1 s, each `apart` pages of addresses behind the
    /// one before, and what they cost until 9 s with mappings that stay for `residency_ms`.
    fn requests_of_eight(apart: u64, residency_ms: u64) -> f64 {
        let mut text = format!(
            "# exitless policy: reuse=optimistic residency_ms={residency_ms}\n\
             # exitless window: w 0\n"
        );
        let mut line = |second: u64, event: &str| {
            text.push_str(&format!("x-1 [000] d..1. {second}.000000: {event}\n"));
        };
        line(1, "tracing_mark_write: workload marker 1");
        for page in 0..8 {
            let iova = 0xf0000 + page * apart;
            let (at, of) = (format!("dma_addr={iova:x}000 size=9"), 0x100 + page * 7);
            let map = format!("dma_map_page: d dir=TO_DEVICE {at} phys_addr={of:x}000 attrs=");
            line(1, &map);
            line(1, &format!("dma_unmap_page: d dir=TO_DEVICE {at} attrs="));
        }
        line(9, "tracing_mark_write: workload marker 2");
        let calls = parse(&text).unwrap();
        let windows = calls.windows().unwrap();
        let policy = Policy::parse(calls.values("policy").next().unwrap()).unwrap();
        replay(&calls, &windows, policy).unwrap()[0] as f64
    }

    #[test]
    fn mappings_removed_together_share_an_unmap_where_their_addresses_follow() {
        assert_eq!(requests_of_eight(1, 60_000), 8.0);
        assert_eq!(requests_of_eight(1, 4000), 9.0);
        assert_eq!(requests_of_eight(2, 4000), 16.0);
        assert_eq!(unmaps(vec![(8, 4), (4, 4), (16, 1), (12, 3)]), 2);
        let span = |pages| span_of(IovaRange::new(IovaPfn::new(64), pages).unwrap());
        assert_eq!([1, 3, 31, 33].map(span), [1, 4, 32, 33]);
    }

    #[test]
    fn the_worker_removes_at_its_turns_what_would_grow_too_old_before_the_next() {
        // Released at 1 s, turns every 250 ms: at 2.75 s it would be two seconds old at the next
        // one.
        let policy = Policy::parse("reuse=optimistic residency_ms=2000").unwrap();
        let mut endpoint = Endpoint::new(policy);
        let key = Key::new(PhysAddr::new(0x1000), 1, Access::Read).unwrap();
        let range = endpoint.map(key, 77, 1000 * MS).unwrap();
        endpoint.unmap(key, range, 1000 * MS);
        endpoint.expire(2749 * MS);
        assert_eq!(endpoint.requests, 1);
        endpoint.expire(2750 * MS);
        assert_eq!((endpoint.requests, endpoint.next_ns), (2, None));
    }

    #[test]
    fn uses_of_pages_are_counted_in_their_window() {
        let calls = parse(&trace("", 8, &CALLS)).unwrap();
        let mut object = Object::default();
        uses(&calls, &mut object).unwrap();
        let of = |key: &str| object.get(key);
        assert_eq!(of("w_creates"), Some(4.0));
        assert_eq!(of("w_distinct_pages"), Some(2.0));
        assert_eq!(of("w_uses_per_page"), Some(2.0));
        let [whole, tree] = bytes(&calls).unwrap();
        assert!(whole > tree && tree > 0.0);
    }

    #[test]
    fn counted_requests_are_compared_with_the_model() {
        let same = compared("reuse=optimistic", 2, &CALLS).unwrap();
        assert_eq!(same[0].points(), 0.0);
        let other = compared("reuse=optimistic", 4, &CALLS).unwrap();
        assert_eq!((other[0].removed[0], other[0].points()), (50.0, 25.0));
        assert!(compared("reuse=async", 2, &CALLS).is_err());
        assert!(compared("reuse=none", 2, &CALLS[1..9]).is_err());
    }
}
