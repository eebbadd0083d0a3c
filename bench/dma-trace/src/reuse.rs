//! Share of map events that reuse a mapping.
//!
//! A map event counts as reuse when each of its pages was, with the same access, either live in
//! another mapping or among the last `n` pages unmapped (each page once, at its latest unmap). That
//! is the hit rate of a cache of `n` idle entries in the order of unmapping (FIFO over idle
//! entries, refreshed by use), keyed by page and access.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use crate::{Access, Action, Trace};

/// Shares of map events, in one trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reuse {
    /// Map events.
    pub maps: u64,
    /// Those whose pages are all live in another mapping.
    pub live: u64,
    /// Those a cache of 256 idle pages serves, live ones included.
    pub idle_256: u64,
    /// The same with 4,096.
    pub idle_4096: u64,
    /// The same without a bound.
    pub ever: u64,
}

impl fmt::Display for Reuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |count: u64| count as f64 * 100.0 / self.maps.max(1) as f64;
        write!(
            f,
            "live {:.1} %, within 256 idle pages {:.1} %, within 4096 {:.1} %, ever {:.1} %",
            percent(self.live),
            percent(self.idle_256),
            percent(self.idle_4096),
            percent(self.ever)
        )
    }
}

/// Idle pages in the order in which they became so; at most `bound`.
#[derive(Default)]
struct Idle {
    bound: usize,
    clock: u64,
    at: HashMap<(u64, Access), u64>,
    order: BTreeMap<u64, (u64, Access)>,
}

impl Idle {
    fn insert(&mut self, key: (u64, Access)) {
        self.remove(key);
        self.clock += 1;
        self.at.insert(key, self.clock);
        self.order.insert(self.clock, key);
        if self.order.len() > self.bound
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.at.remove(&oldest);
        }
    }

    fn remove(&mut self, key: (u64, Access)) -> bool {
        match self.at.remove(&key) {
            Some(clock) => self.order.remove(&clock).is_some(),
            None => false,
        }
    }
}

/// The shares of `trace`.
#[must_use]
pub fn of(trace: &Trace) -> Reuse {
    let mut live: HashMap<(u64, Access), u32> = HashMap::new();
    let mut idle = [256, 4096, usize::MAX].map(|bound| Idle {
        bound,
        ..Idle::default()
    });
    let mut found = [0; 3];
    let mut reuse = Reuse {
        maps: 0,
        live: 0,
        idle_256: 0,
        idle_4096: 0,
        ever: 0,
    };
    for event in &trace.events {
        let keys = (0..u64::from(event.pages)).map(|page| (event.pfn + page, event.access));
        match event.action {
            Action::Map => {
                reuse.maps += 1;
                let (mut all_live, mut all) = (true, [true; 3]);
                for key in keys {
                    let count = live.entry(key).or_default();
                    let is_live = *count > 0;
                    *count += 1;
                    all_live &= is_live;
                    for (all, idle) in all.iter_mut().zip(&mut idle) {
                        *all &= idle.remove(key) || is_live;
                    }
                }
                reuse.live += u64::from(all_live);
                for (found, all) in found.iter_mut().zip(all) {
                    *found += u64::from(all);
                }
            }
            Action::Unmap => {
                for key in keys {
                    let count = live.entry(key).or_default();
                    *count = count.saturating_sub(1);
                    if *count == 0 {
                        live.remove(&key);
                        idle.iter_mut().for_each(|idle| idle.insert(key));
                    }
                }
            }
        }
    }
    [reuse.idle_256, reuse.idle_4096, reuse.ever] = found;
    reuse
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MAGIC;

    fn reuse(events: &str) -> Reuse {
        of(&Trace::parse(&format!("{MAGIC}\n{events}")).unwrap())
    }

    #[test]
    fn a_page_counts_again_only_with_the_same_access() {
        let again = reuse("w1\nW1\nw1\nW1\nr1\n");
        assert_eq!(
            (again.maps, again.live, again.idle_256, again.ever),
            (3, 0, 1, 1)
        );
        let live = reuse("w1\nw1\n");
        assert_eq!((live.maps, live.live, live.idle_256), (2, 1, 1));
    }

    #[test]
    fn the_oldest_idle_page_leaves_first() {
        let mut events = String::new();
        for page in 0..257 {
            events.push_str(&format!("w{page:x}\nW{page:x}\n"));
        }
        let far = reuse(&format!("{events}w0\n"));
        assert_eq!((far.idle_256, far.idle_4096), (0, 1));
        let near = reuse(&format!("{events}w1\n"));
        assert_eq!((near.idle_256, near.idle_4096), (1, 1));
    }

    #[test]
    fn a_range_counts_when_all_its_pages_do() {
        assert_eq!(reuse("w1\nW1\nw1+2\n").ever, 0);
        assert_eq!(reuse("w1\nw2\nW2\nw1+2\n").ever, 1);
    }
}
