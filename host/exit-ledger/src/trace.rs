//! VM exits counted by KVM's tracepoints: histogram triggers (the kernel's `trace/histogram.rst`)
//! in a trace instance of this process, on the threads that run vCPUs.
//!
//! KVM's statistics do not give the reason of most exits. These histograms do:
//! * `kvm:kvm_exit` by reason;
//! * `kvm:kvm_eoi` and `kvm:kvm_pv_eoi` by vector: an end of interrupt that was not paravirtual is
//!   an exit, and one of the guest's timer vector is attributed to the timer;
//! * `kvm:kvm_msr` by register: a write to the TSC deadline or the initial count is attributed to
//!   the guest's timer;
//! * the vector that was injected after each exit, joined by the kernel from `kvm_exit` and
//!   `kvm_inj_virq` into a synthetic event: an interrupt window that ended in the injection of the
//!   timer's vector is attributed to the timer;
//! * the first host interrupt handler that ran after an entry, joined with the exit for an external
//!   interrupt that it caused. `irq_vectors:local_timer_entry`, the host's tick, is counted
//!   separately;
//! * on request, `kvm:kvm_page_fault` on the IOMMU's register page and in RAM;
//! * on request, `kvm:kvm_mmio` and `kvm:kvm_fast_mmio` by address, in the PCI window: doorbells
//!   that reach another process by ioeventfd are exits too.
//!
//! # A tick and its exit
//! The host's tick also interrupts a vCPU's thread in host code, where it causes no exit. The order
//! of the events in the trace of an exit for an external interrupt depends on the kernel (seen in
//! the lab, kvm-amd):
//! ```text
//! 6.1    kvm_entry, local_timer_entry, kvm_exit
//!        kvm_exit is traced with interrupts on: the handler has run
//! 6.12   kvm_entry, kvm_exit, local_timer_entry
//!        kvm_exit is traced with interrupts off: the handler is next
//! ```
//! On Intel it is always the second order. `common_flags` of `kvm_exit` says whether interrupts
//! were off, so the histograms join both cases: an exit with interrupts on with the first handler
//! since the entry, an exit with interrupts off with the next handler. The next entry clears both.
//! Handlers without a tracepoint (of posted interrupts, for example) join nothing: their exit is
//! counted as an external interrupt. On a kernel of the second order, a tick in host code between
//! such an exit and the next entry is wrongly attributed to that exit.
//!
//! The kernel counts; no event is recorded by itself. Without tracefs the ledger has the coarser
//! statistics only, and a larger *unattributed* column.

mod leftovers;
mod rows;
mod triggers;

use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::account::PageFaults;
use crate::reasons::Traced;
use rows::{Counts, parse, total_under};
use triggers::{Names, Trigger};

const ROOT: &str = "/sys/kernel/tracing";

/// Reason why there are no histograms on this host, and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// tracefs is not mounted at its usual place.
    #[error("tracefs is not mounted: mount -t tracefs none {ROOT}")]
    NotMounted,
    /// tracefs is mounted, but this process may not use it.
    #[error(
        "no permission for {ROOT} ({0}): run this as root; a container has to be given it for \
         writing, and a kernel that is locked \
         down keeps it from all"
    )]
    Forbidden(io::Error),
    /// The kernel was built without a required feature.
    #[error("this kernel has no {what}: it takes {remedy}")]
    Lacks {
        /// The feature.
        what: &'static str,
        /// The kernel option that adds it.
        remedy: &'static str,
    },
    /// The kernel refuses the definition of a synthetic event or a trigger.
    #[error("the kernel refuses {what:?} ({source})")]
    Refused {
        /// The line that was written to tracefs.
        what: String,
        /// The kernel's error.
        source: io::Error,
    },
}

/// Checks that tracefs has the files that histograms need. Changes nothing.
fn look_for_parts() -> Result<(), TraceError> {
    let is_there = |path: &str| match fs::metadata(Path::new(ROOT).join(path)) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(TraceError::Forbidden(error)),
    };
    if !is_there("instances")? {
        return Err(TraceError::NotMounted);
    }
    for (path, what, remedy) in [
        (
            "events/kvm/kvm_exit",
            "tracepoints of KVM",
            "CONFIG_TRACEPOINTS",
        ),
        (
            "events/kvm/kvm_exit/hist",
            "histograms of events",
            "CONFIG_HIST_TRIGGERS",
        ),
        (
            "synthetic_events",
            "synthetic events",
            "CONFIG_SYNTH_EVENTS",
        ),
    ] {
        if !is_there(path)? {
            return Err(TraceError::Lacks { what, remedy });
        }
    }
    Ok(())
}

/// Histograms of a group of threads; removed from tracefs when dropped.
#[derive(Debug)]
pub struct ExitHistogram {
    instance: PathBuf,
    names: Names,
    tids: Vec<i32>,
    /// Triggers that were set and are removed on drop.
    triggers: Vec<Trigger>,
    /// Triggers that count page faults: on the IOMMU's register pages, and in RAM.
    page_faults: Option<[Trigger; 2]>,
    /// Events whose histograms count writes by address.
    mmio: Vec<String>,
}

impl ExitHistogram {
    /// Sets the histograms up for the threads `tids`. Removes the histograms of processes that were
    /// killed.
    ///
    /// # Errors
    /// No tracefs, no permission, or a kernel without these events.
    pub fn new(tids: &[i32]) -> Result<Self, TraceError> {
        look_for_parts()?;
        let pid = std::process::id();
        leftovers::remove(pid);
        let instance = instance_of(pid);
        fs::create_dir(&instance).map_err(TraceError::Forbidden)?;
        let mut this = Self {
            instance,
            names: Names::of_process(pid),
            tids: tids.to_vec(),
            triggers: Vec::new(),
            page_faults: None,
            mmio: Vec::new(),
        };
        for definition in this.names.definitions() {
            append(&Path::new(ROOT).join("synthetic_events"), &definition).map_err(|source| {
                TraceError::Refused {
                    what: definition,
                    source,
                }
            })?;
        }
        for trigger in triggers::triggers(tids, &this.names) {
            let what = trigger.text.clone();
            this.set(trigger)
                .map_err(|source| TraceError::Refused { what, source })?;
        }
        Ok(this)
    }

    /// Also counts page faults by address: on the IOMMU's register pages, and in any of the ranges
    /// `ram`.
    ///
    /// # Errors
    /// The kernel lacks the event, or the event has no address field.
    pub fn locate_page_faults(
        &mut self,
        register_pages: Range<u64>,
        ram: &[Range<u64>],
    ) -> io::Result<()> {
        let here = triggers::page_faults(&self.tids, &[register_pages]);
        let there = triggers::page_faults(&self.tids, ram);
        self.set(here.clone())?;
        self.set(there.clone())?;
        self.page_faults = Some([here, there]);
        Ok(())
    }

    /// Also counts writes to `[first, end)` by address. An event that the kernel lacks counts
    /// nothing.
    ///
    /// # Errors
    /// The kernel lacks both events.
    pub fn count_writes(&mut self, first: u64, end: u64) -> io::Result<()> {
        let mut outcome = Ok(());
        for trigger in triggers::writes(&self.tids, first, end) {
            let event = trigger.event.clone();
            match self.set(trigger) {
                Ok(()) => self.mmio.push(event),
                Err(error) => outcome = Err(error),
            }
        }
        if self.mmio.is_empty() {
            outcome
        } else {
            Ok(())
        }
    }

    /// Returns each address written, with the number of writes; see
    /// [`count_writes`](Self::count_writes).
    pub fn writes(&self) -> io::Result<Vec<(u64, u64)>> {
        let mut writes = Vec::new();
        for event in &self.mmio {
            let rows = parse(&self.text_of(event)?);
            writes.extend(rows.into_iter().map(|(keys, count)| (keys[0], count)));
        }
        Ok(writes)
    }

    /// Returns the page faults so far; `None` unless
    /// [`locate_page_faults`](Self::locate_page_faults) was called, and succeeded.
    pub fn page_faults(&self) -> io::Result<Option<PageFaults>> {
        let Some([register_page, memory]) = &self.page_faults else {
            return Ok(None);
        };
        let text = self.text_of(triggers::PAGE_FAULTS)?;
        Ok(Some(PageFaults {
            register_page: total_under(&text, &register_page.filter),
            memory: total_under(&text, &memory.filter),
        }))
    }

    /// Returns the counts so far.
    pub fn read(&self) -> io::Result<Traced> {
        let rows = |event: &str| self.text_of(event).map(|text| parse(&text));
        let counts = Counts {
            exits: rows(triggers::EXITS)?,
            eoi: rows(triggers::EOI)?,
            pv_eoi: rows(triggers::PV_EOI)?,
            msrs: rows(triggers::MSRS)?,
            ticks: rows(&Names::directory(&self.names.ticked))?,
            other_interrupts: rows(&Names::directory(&self.names.interrupted))?,
            injected: rows(&Names::directory(&self.names.injected))?,
        };
        Ok(counts.traced())
    }

    fn set(&mut self, trigger: Trigger) -> io::Result<()> {
        append(&self.control(&trigger), &trigger.line()).map_err(|error| {
            let Trigger { event, text, .. } = &trigger;
            io::Error::new(error.kind(), format!("{event}: {text}: {error}"))
        })?;
        self.triggers.push(trigger);
        Ok(())
    }

    fn control(&self, trigger: &Trigger) -> PathBuf {
        self.instance.join(&trigger.event).join("trigger")
    }

    fn text_of(&self, event: &str) -> io::Result<String> {
        fs::read_to_string(self.instance.join(event).join("hist"))
    }
}

impl Drop for ExitHistogram {
    fn drop(&mut self) {
        // In reverse: a join uses a variable of an earlier trigger. An error means that the kernel
        // has removed the trigger already.
        for trigger in self.triggers.iter().rev() {
            let _ = append(&self.control(trigger), &trigger.undo());
        }
        let _ = fs::remove_dir(&self.instance);
        for name in self.names.all() {
            let _ = append(
                &Path::new(ROOT).join("synthetic_events"),
                &format!("!{name}"),
            );
        }
    }
}

fn instance_of(pid: u32) -> PathBuf {
    Path::new(ROOT).join(format!("instances/exitless-{pid}"))
}

/// Appends a line to a control file. Truncation would remove the triggers of other programs.
fn append(path: &Path, line: &str) -> io::Result<()> {
    use std::io::Write;
    let mut file = fs::File::options().append(true).open(path)?;
    file.write_all(line.as_bytes())
}

#[cfg(test)]
mod tests;
