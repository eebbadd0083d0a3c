//! Parser of the kernel's `trace` file, for the events of DMA mapping.
//!
//! Three kinds of lines are read; the fields before the event (task, CPU, flags, time) are skipped:
//!
//! | event | fields | source |
//! |---|---|---|
//! | `map` | `iova=0xA - 0xB paddr=0xP size=N` | tracepoint `iommu:map` |
//! | `unmap` | `iova=0xA - 0xB size=N unmapped_size=N` | tracepoint `iommu:unmap` |
//! | `prot` | `iova=0xA prot=0xF` | a kprobe on the driver's `map_pages`, set by the recorder |
//!
//! `prot` precedes its `map`. Bit 0 allows the device to read, bit 1 to write. An unmap names only
//! IOVAs; its pages are those of the map. The kernel unmaps exactly the ranges that it has mapped
//! (anything else is an error here).

use std::collections::HashMap;

use crate::{Access, Action, Event, PAGES_MAX, PFN_MAX};

const PAGE_SHIFT: u32 = 12;

/// Contents of the trace file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Recorded {
    /// The events in order.
    pub events: Vec<Event>,
    /// Number of map events of a page with the same access as an unmap at most 10 ms before, by the
    /// clock of the recorded machine.
    pub within_10_ms: u64,
}

/// Reads the trace of one IOMMU domain, recorded on one processor.
///
/// # Errors
/// The line that is invalid, with the reason.
pub fn read(text: &str) -> Result<Recorded, String> {
    let mut recorded = Recorded::default();
    let mut live: HashMap<u64, Event> = HashMap::new();
    let mut unmapped: HashMap<(u64, Access), f64> = HashMap::new();
    let mut prot = None;
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let wrong = |reason: &str| format!("{reason}: {line}");
        if line.contains("LOST") {
            return Err(wrong("the trace buffer was too small"));
        }
        if line.contains(" prot: ") {
            let iova = field(line, "iova=").ok_or_else(|| wrong("no IOVA"))?;
            let bits = field(line, "prot=").ok_or_else(|| wrong("no protection"))?;
            prot = Some((iova, bits));
        } else if line.contains(" map: ") {
            let iova = field(line, "iova=").ok_or_else(|| wrong("no IOVA"))?;
            let paddr = field(line, "paddr=").ok_or_else(|| wrong("no address"))?;
            let size = field(line, " size=").ok_or_else(|| wrong("no size"))?;
            let (pfn, pages) = pages(paddr, size).ok_or_else(|| wrong("not whole pages"))?;
            let access = match prot.take() {
                Some((at, bits)) if (iova..iova.saturating_add(size)).contains(&at) => {
                    access(bits).ok_or_else(|| wrong("no access"))?
                }
                _ => return Err(wrong("a map without its protection")),
            };
            let event = Event {
                action: Action::Map,
                access,
                pfn,
                pages,
            };
            if live.insert(iova, event).is_some() {
                return Err(wrong("mapped twice"));
            }
            let now = time(line).ok_or_else(|| wrong("no time"))?;
            let recent = unmapped.get(&(pfn, access));
            recorded.within_10_ms += u64::from(recent.is_some_and(|then| now - then <= 0.010));
            recorded.events.push(event);
        } else if line.contains(" unmap: ") {
            let iova = field(line, "iova=").ok_or_else(|| wrong("no IOVA"))?;
            let size = field(line, " unmapped_size=").ok_or_else(|| wrong("no size"))?;
            let event = live
                .remove(&iova)
                .ok_or_else(|| wrong("unmaps what is not mapped"))?;
            if size >> PAGE_SHIFT != u64::from(event.pages) {
                return Err(wrong("unmaps a part"));
            }
            let now = time(line).ok_or_else(|| wrong("no time"))?;
            unmapped.insert((event.pfn, event.access), now);
            recorded.events.push(Event {
                action: Action::Unmap,
                ..event
            });
        }
    }
    Ok(recorded)
}

fn pages(paddr: u64, size: u64) -> Option<(u64, u32)> {
    let whole = (paddr | size).trailing_zeros() >= PAGE_SHIFT && size > 0;
    let pages = u32::try_from(size >> PAGE_SHIFT).ok()?;
    let pfn = paddr >> PAGE_SHIFT;
    (whole && pages <= PAGES_MAX && pfn <= PFN_MAX).then_some((pfn, pages))
}

fn access(bits: u64) -> Option<Access> {
    match bits & 3 {
        1 => Some(Access::Read),
        2 => Some(Access::Write),
        3 => Some(Access::Both),
        _ => None,
    }
}

/// Returns the number after `key`: hexadecimal with `0x`, else decimal.
fn field(line: &str, key: &str) -> Option<u64> {
    let rest = &line[line.find(key)? + key.len()..];
    let end = rest
        .find(|c: char| !c.is_ascii_alphanumeric())
        .unwrap_or(rest.len());
    match rest[..end].strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => rest[..end].parse().ok(),
    }
}

/// Returns the time of an event in seconds: the first word that is a number followed by `:`.
fn time(line: &str) -> Option<f64> {
    let mut words = line.split_whitespace();
    words.find_map(|word| word.strip_suffix(':').and_then(|word| word.parse().ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "# tracer: nop\n#\n";

    fn lines(lines: &[&str]) -> Result<Recorded, String> {
        let mut text = HEAD.to_owned();
        for (at, line) in lines.iter().enumerate() {
            text.push_str(&format!("  <idle>-0  [000] ..s1.  12.{at:03}000: {line}\n"));
        }
        read(&text)
    }

    const PROT: &str = "prot: (intel_iommu_map_pages+0x0/0x90) iova=0xfffff000 prot=0x2";
    const MAP: &str = "map: IOMMU: iova=0x00000000fffff000 - 0x0000000100000000 \
         paddr=0x0000000001a2b000 size=4096";
    const UNMAP: &str =
        "unmap: IOMMU: iova=0x00000000fffff000 - 0x0000000100000000 size=4096 unmapped_size=4096";

    #[test]
    fn a_mapping_begins_ends_and_comes_back() {
        let recorded = lines(&[PROT, MAP, UNMAP, PROT, MAP]).unwrap();
        assert_eq!(recorded.within_10_ms, 1);
        let event = |action| Event {
            action,
            access: Access::Write,
            pfn: 0x1a2b,
            pages: 1,
        };
        assert_eq!(
            recorded.events,
            [Action::Map, Action::Unmap, Action::Map].map(event)
        );
    }

    #[test]
    fn inconsistent_lines_are_errors_that_name_the_reason() {
        let reason = |list: &[&str]| lines(list).unwrap_err();
        assert!(reason(&[UNMAP]).starts_with("unmaps what is not mapped"));
        assert!(reason(&[MAP]).starts_with("a map without its protection"));
        assert!(reason(&[PROT, MAP, PROT, MAP]).starts_with("mapped twice"));
        let part = UNMAP.replace("unmapped_size=4096", "unmapped_size=0");
        assert!(reason(&[PROT, MAP, &part]).starts_with("unmaps a part"));
        let odd = MAP.replace("size=4096", "size=100");
        assert!(reason(&[PROT, &odd]).starts_with("not whole pages"));
        assert!(read("CPU:0 [LOST 12 EVENTS]\n").is_err());
    }
}
