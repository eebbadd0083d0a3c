//! Limit of the log's rate: each place in this program has a budget of lines on standard error,
//! whatever causes them.
//!
//! An act of a guest may be worth a warning and costs it a few register writes: a device started
//! with a bad ring, a BAR moved onto another's. Each *place* (a `tracing` callsite) has a
//! [`LogRateLimit`], 20 lines at once and one a second after that. The lines that it leaves out are
//! counted, and their number is printed before its next line or at the end. Places do not share: a
//! guest that exhausts the budget of one leaves the others theirs.
//!
//! Only warnings and errors are counted: a user who asks for more by `--log` (a driver's script is
//! one line per register access) gets all of it. Lines about an export have a budget of that
//! export's own (`vhost-export`), and those about an image of its disk's (`vio`), so that no front
//! end and no bad disk silences another.
//!
//! Bound: as many entries as there are places in the program. Cost: a lock, for each line that
//! would be printed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use sidecore::Nanos;
use tracing::callsite::Identifier;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use vio::LogRateLimit;

/// The fields that name the export or the image that a line is about.
const OWN_BUDGET: [&str; 2] = ["export", "image"];

/// The budgets of all places; clones share them.
#[derive(Clone)]
pub struct Budgets {
    places: Arc<Mutex<HashMap<Identifier, CallSite>>>,
    now: fn() -> u64,
    say: fn(&str),
}

/// One place, and its budget.
struct CallSite {
    metadata: &'static Metadata<'static>,
    budget: LogRateLimit,
}

impl CallSite {
    /// Says how much was left out, if anything was.
    fn own_up(&self, left_out: u64, say: fn(&str)) {
        if left_out != 0 {
            let metadata = self.metadata;
            let (target, line) = (metadata.target(), metadata.line().unwrap_or(0));
            say(&format!(
                "{left_out} more messages of {target}:{line} were left out"
            ));
        }
    }
}

impl Budgets {
    /// Creates full budgets. The number of lines that are left out is printed by `say`, line by
    /// line.
    pub fn new(say: fn(&str)) -> Self {
        Self {
            places: Arc::default(),
            now: || Nanos::now().0,
            say,
        }
    }

    /// Prints at the end what was left out and has not been reported yet.
    pub fn finish(&self) {
        let places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        for place in places.values() {
            place.own_up(place.budget.take_unsaid(), self.say);
        }
    }

    fn admits(&self, metadata: &'static Metadata<'static>) -> bool {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let place = places.entry(metadata.callsite()).or_insert(CallSite {
            metadata,
            budget: LogRateLimit::default(),
        });
        let admitted = place.budget.admits_at((self.now)());
        if let Some(left_out) = admitted {
            place.own_up(left_out, self.say);
        }
        admitted.is_some()
    }
}

impl<S: Subscriber> Layer<S> for Budgets {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        *metadata.level() > Level::WARN || has_own(metadata) || self.admits(metadata)
    }
}

/// Returns whether its origin keeps a budget for each thing that it may be about.
fn has_own(metadata: &Metadata<'_>) -> bool {
    let fields = metadata.fields();
    OWN_BUDGET.iter().any(|name| fields.field(name).is_some())
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    const BURST: u64 = LogRateLimit::BURST;
    const EVERY_NS: u64 = LogRateLimit::EVERY_NS;

    thread_local! {
        static NOW: Cell<u64> = const { Cell::new(1 << 50) };
        static SAID: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    /// Counts the lines that come through, by their place.
    struct LineCounter(Arc<Mutex<HashMap<u32, u64>>>);

    impl<S: Subscriber> Layer<S> for LineCounter {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            let line = event.metadata().line().unwrap();
            *self.0.lock().unwrap().entry(line).or_default() += 1;
        }
    }

    /// Returns the lines that `speak` prints under budgets, as counts, ascending.
    fn heard(speak: impl FnOnce(&Budgets)) -> Vec<u64> {
        let lines = Arc::default();
        let budgets = Budgets {
            now: || NOW.get(),
            ..Budgets::new(|text| SAID.with_borrow_mut(|said| said.push(text.to_owned())))
        };
        let subscriber = tracing_subscriber::registry()
            .with(LineCounter(Arc::clone(&lines)))
            .with(budgets.clone());
        tracing::subscriber::with_default(subscriber, || speak(&budgets));
        let mut counts: Vec<u64> = lines.lock().unwrap().values().copied().collect();
        counts.sort_unstable();
        counts
    }

    fn pass(seconds: u64) {
        NOW.set(NOW.get() + seconds * EVERY_NS);
    }

    #[test]
    fn a_flood_from_one_place_is_cut_and_another_place_is_heard() {
        let counts = heard(|_| {
            for round in 0..10_000 {
                tracing::warn!(round, "again");
                if round % 2_000 == 0 {
                    tracing::error!(round, "another place");
                }
            }
        });
        assert_eq!(counts, [5, BURST]);
    }

    #[test]
    fn suppressed_lines_are_counted_and_reported() {
        let shout = || tracing::warn!("again");
        let counts = heard(|budgets| {
            (0..BURST + 30).for_each(|_| shout());
            assert!(SAID.take().is_empty());
            pass(1);
            shout();
            let said = SAID.take();
            assert!(
                said.len() == 1 && said[0].starts_with("30 more messages of "),
                "{said:?}"
            );
            (0..7).for_each(|_| shout());
            budgets.finish();
            let said = SAID.take();
            assert!(
                said.len() == 1 && said[0].starts_with("7 more "),
                "{said:?}"
            );
            budgets.finish();
            assert!(SAID.take().is_empty(), "said once");
            // After a rest all of the budget is there again.
            pass(100);
            (0..100).for_each(|_| shout());
        });
        assert_eq!(counts, [2 * BURST + 1]);
    }

    #[test]
    fn requested_levels_and_lines_with_their_own_budget_are_not_limited() {
        let counts = heard(|_| {
            for round in 0..1_000 {
                tracing::trace!(round, "a register access");
                tracing::warn!(export = "d0", "of one front end");
                tracing::warn!(image = "a.raw", "of one disk");
            }
        });
        assert_eq!(counts, [1_000, 1_000, 1_000]);
    }
}
