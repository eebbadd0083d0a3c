//! DMA calls of all devices of a kernel, as its trace has them: the events `dma:*` of Linux 6.12
//! and later.
//!
//! The events are above the IOMMU driver: the same calls are traced for every driver and every
//! policy. So the trace of a run holds the requests to its policy, and [`Calls::windows`] says
//! which of it lies between two markers (`workload marker 1` and `2`, by a program in the guest).
//!
//! Coherent memory is one request when it is allocated and one when it is freed, under every
//! policy; its pages are not traced.

use std::collections::HashMap;

use crate::{Access, Action, Event, PAGES_MAX, PFN_MAX, Trace};

const PAGE_SHIFT: u32 = 12;
/// Begin of a line of `#` that is the recorder's own: `# exitless key: value`.
const OWN: &str = "# exitless ";

/// One call, or a marker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A streaming mapping begins or ends.
    Streaming {
        /// Index in [`Calls::devices`].
        device: usize,
        /// Pages.
        event: Event,
        /// First page of the address that the device received.
        iova: u64,
    },
    /// Coherent memory was allocated or freed.
    Coherent,
    /// A program wrote this marker.
    Marker(u8),
}

/// Contents of a kernel's trace, from its boot on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Calls {
    /// Lines of its recorder, `key` and `value`, in order.
    pub head: Vec<(String, String)>,
    /// Names of devices.
    pub devices: Vec<String>,
    /// Steps in order, with their time, microseconds since the kernel's boot.
    pub steps: Vec<(u64, Step)>,
}

impl Calls {
    /// Reads the trace of one processor.
    ///
    /// # Errors
    /// The line that does not fit, with the reason: events were lost, a list was mapped, or an
    /// unmap has no map.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut calls = Self::default();
        let mut live: HashMap<(usize, u64), (Event, u32)> = HashMap::new();
        for line in text.lines() {
            let wrong = |reason: &str| format!("{reason}: {line}");
            if let Some(own) = line.strip_prefix(OWN) {
                let pair = own.split_once(": ").ok_or_else(|| wrong("no value"))?;
                calls.head.push((pair.0.to_owned(), pair.1.to_owned()));
                continue;
            }
            if line.starts_with('#') {
                if let Some(rest) = line.split("entries-written: ").nth(1)
                    && let Some((kept, written)) = rest.split_once('/')
                    && written.split_whitespace().next() != Some(kept)
                {
                    return Err(wrong("the trace buffer was too small"));
                }
                continue;
            }
            if line.contains("LOST") {
                return Err(wrong("the trace buffer was too small"));
            }
            let Some((time, call)) = timed(line) else {
                return Err(wrong("no event"));
            };
            let (name, rest) = call.split_once(": ").ok_or_else(|| wrong("no event"))?;
            let step = match name {
                "tracing_mark_write" => match rest.strip_prefix("workload marker ") {
                    Some(value) => {
                        Step::Marker(value.trim().parse().map_err(|_| wrong("no marker"))?)
                    }
                    None => continue,
                },
                "dma_map_page" | "dma_unmap_page" => {
                    let (device, fields) =
                        rest.split_once(' ').ok_or_else(|| wrong("no device"))?;
                    let device = calls.device(device);
                    let iova = field(fields, "dma_addr=").ok_or_else(|| wrong("no address"))?;
                    let key = (device, iova >> PAGE_SHIFT);
                    let event = if name == "dma_map_page" {
                        let event = map(fields).ok_or_else(|| wrong("no mapping"))?;
                        let of = live.entry(key).or_insert((event, 0));
                        // Several uses of one mapping: the driver of the IOMMU shares it.
                        if of.0 != event {
                            return Err(wrong("other pages are mapped there"));
                        }
                        of.1 += 1;
                        event
                    } else {
                        let of = live.get_mut(&key);
                        let of = of.ok_or_else(|| wrong("unmaps what is not mapped"))?;
                        of.1 -= 1;
                        let event = of.0;
                        if of.1 == 0 {
                            live.remove(&key);
                        }
                        Event {
                            action: Action::Unmap,
                            ..event
                        }
                    };
                    Step::Streaming {
                        device,
                        event,
                        iova: key.1,
                    }
                }
                "dma_alloc" | "dma_free" | "dma_alloc_pages" | "dma_free_pages" => Step::Coherent,
                _ if name.starts_with("dma_sync_") => continue,
                _ => return Err(wrong("no event that is read")),
            };
            calls.steps.push((time, step));
        }
        Ok(calls)
    }

    fn device(&mut self, name: &str) -> usize {
        let known = self.devices.iter().position(|own| own == name);
        known.unwrap_or_else(|| {
            self.devices.push(name.to_owned());
            self.devices.len() - 1
        })
    }

    /// Values of the recorder's lines of this key.
    pub fn values<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        let lines = self.head.iter().filter(move |(own, _)| own == key);
        lines.map(|(_, value)| value.as_str())
    }

    /// Indexes of the steps between the markers 1 and 2 of each window.
    ///
    /// # Errors
    /// A window has no end, or begins in another.
    pub fn windows(&self) -> Result<Vec<std::ops::Range<usize>>, String> {
        let (mut windows, mut begun) = (Vec::new(), None);
        for (at, (_, step)) in self.steps.iter().enumerate() {
            match (step, begun) {
                (Step::Marker(1), None) => begun = Some(at + 1),
                (Step::Marker(2), Some(from)) => {
                    windows.push(from..at);
                    begun = None;
                }
                (Step::Marker(1 | 2), _) => {
                    return Err(format!("marker {} is out of place", windows.len() + 1));
                }
                _ => {}
            }
        }
        match begun {
            None => Ok(windows),
            Some(_) => Err(format!("window {} has no end", windows.len() + 1)),
        }
    }

    /// The page sequence of these steps, of all devices. An unmap may have its map before it.
    #[must_use]
    pub fn pages(&self, steps: std::ops::Range<usize>) -> Trace {
        let events = self.steps[steps].iter().filter_map(|(_, step)| match step {
            Step::Streaming { event, .. } => Some(*event),
            _ => None,
        });
        Trace {
            head: Vec::new(),
            events: events.collect(),
        }
    }
}

/// Time, microseconds, and what is behind it.
fn timed(line: &str) -> Option<(u64, &str)> {
    let mut rest = line;
    // The name of the task may have blanks and colons in it: the first word that is a time ends the
    // head.
    while let Some((head, behind)) = rest.split_once(": ") {
        let word = head.split_whitespace().last()?;
        if let Some((seconds, micros)) = word.split_once('.')
            && micros.len() == 6
            && let (Ok(seconds), Ok(micros)) = (seconds.parse::<u64>(), micros.parse::<u64>())
        {
            let time = seconds.checked_mul(1_000_000)?.checked_add(micros)?;
            return Some((time, behind.trim_start()));
        }
        rest = behind;
    }
    None
}

/// The mapping that a call begins; none where it failed.
fn map(fields: &str) -> Option<Event> {
    let access = match fields.split("dir=").nth(1)?.split(' ').next()? {
        "TO_DEVICE" => Access::Read,
        "FROM_DEVICE" => Access::Write,
        "BIDIRECTIONAL" => Access::Both,
        _ => return None,
    };
    let phys = field(fields, "phys_addr=")?;
    let size: u64 = decimal(fields, " size=")?;
    if field(fields, "dma_addr=")? == u64::MAX || size == 0 {
        return None;
    }
    let pfn = phys >> PAGE_SHIFT;
    let last = phys.checked_add(size - 1)? >> PAGE_SHIFT;
    let pages = u32::try_from(last - pfn + 1).ok()?;
    (pages <= PAGES_MAX && last <= PFN_MAX).then_some(Event {
        action: Action::Map,
        access,
        pfn,
        pages,
    })
}

/// The word after `key`.
fn word<'a>(fields: &'a str, key: &str) -> Option<&'a str> {
    let rest = &fields[fields.find(key)? + key.len()..];
    rest.split(' ').next()
}

/// The hexadecimal number after `key`.
fn field(fields: &str, key: &str) -> Option<u64> {
    u64::from_str_radix(word(fields, key)?, 16).ok()
}

fn decimal(fields: &str, key: &str) -> Option<u64> {
    word(fields, key)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A trace as Linux 6.12.117 writes it.
    const TEXT: &str = "\
# exitless policy: reuse=none
# tracer: nop
#
# entries-in-buffer/entries-written: 9/9   #P:1
#           TASK-PID     CPU#  |||||  TIMESTAMP  FUNCTION
         swapper-1       [000] .....     1.000000: dma_alloc: 0000:00:02.0 dma_addr=fffff000 size=4096 virt_addr=1 flags=GFP_KERNEL attrs=
   a: b 1.0: c-163     [000] d..1.   139.119470: dma_map_page: 0000:00:02.0 dir=TO_DEVICE dma_addr=ffffffffbe78 size=16 phys_addr=fccfe78 attrs=
        workload-163     [000] d..1.   139.119471: dma_map_page: 0000:00:02.0 dir=TO_DEVICE dma_addr=ffffffffb010 size=16 phys_addr=fccf010 attrs=
        workload-163     [000] d..1.   139.119472: tracing_mark_write: workload marker 1
        workload-163     [000] d..1.   139.143079: dma_map_page: 0000:00:03.0 dir=FROM_DEVICE dma_addr=ffffffffcff0 size=32 phys_addr=a3b7ff0 attrs=
          <idle>-0       [000] d.H2.   139.240994: dma_unmap_page: 0000:00:02.0 dir=TO_DEVICE dma_addr=ffffffffbe78 size=16 attrs=
          <idle>-0       [000] d.H2.   139.254227: dma_unmap_page: 0000:00:03.0 dir=FROM_DEVICE dma_addr=ffffffffcff0 size=32 attrs=
        workload-163     [000] d..1.   139.254228: tracing_mark_write: workload marker 2
";

    #[test]
    fn calls_have_pages_devices_and_windows() {
        let calls = Calls::parse(TEXT).unwrap();
        assert_eq!(calls.devices, ["0000:00:02.0", "0000:00:03.0"]);
        assert_eq!(calls.values("policy").collect::<Vec<_>>(), ["reuse=none"]);
        assert_eq!(calls.steps[0], (1_000_000, Step::Coherent));
        assert_eq!(calls.steps[1].0, 139_119_470);
        let windows = calls.windows().unwrap();
        assert_eq!((windows.len(), &windows[0]), (1, &(4..7)));
        let pages = calls.pages(4..7);
        assert_eq!(
            pages.to_text(),
            "# exitless dma trace 1\nwa3b7+2\nRfccf\nWa3b7+2\n"
        );
    }

    #[test]
    fn a_trace_that_is_not_whole_is_refused() {
        let error = |from: &str, to: &str| Calls::parse(&TEXT.replace(from, to)).unwrap_err();
        assert!(error("9/9", "9/12").starts_with("the trace buffer was too small"));
        assert!(error("dma_alloc:", "dma_map_sg:").starts_with("no event that is read"));
        let unknown = error("dma_map_page: 0000:00:03.0", "dma_sync_x: 0000:00:03.0");
        assert!(unknown.starts_with("unmaps what is not mapped"));
        assert!(error("phys_addr=fccf010", "phys_addr=fccd010").starts_with("other pages"));
        assert!(
            error(
                "dma_addr=ffffffffbe78 size=16 phys",
                "dma_addr=ffffffffffffffff size=16 phys"
            )
            .starts_with("no mapping")
        );
        assert!(error("139.254228", "139").starts_with("no event"));
        let lost = format!("{TEXT}CPU:0 [LOST 12 EVENTS]\n");
        assert!(Calls::parse(&lost).unwrap_err().contains("too small"));
        for (from, to) in [("marker 2", "marker 3"), ("marker 1", "marker 2")] {
            let calls = Calls::parse(&TEXT.replace(from, to)).unwrap();
            assert!(calls.windows().is_err(), "{to}");
        }
    }
}
