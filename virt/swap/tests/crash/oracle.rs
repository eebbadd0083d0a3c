//! Contents that an image may have after a crash: derived from the guest's requests and their
//! answers.

use std::collections::HashMap;
use std::fmt::Write;

/// Bytes that a disk writes atomically.
pub const SECTOR: usize = 512;

/// Content of a sector: this number in each of its words. No two sectors that are written have the
/// same, except that 0 is zeroes.
pub type Id = u64;

/// Event of a guest's request, in the guest's order: a beginning is recorded before the request, an
/// end after the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// These contents are about to be written from sector `first` on.
    Write {
        number: u64,
        disk: usize,
        first: u64,
        ids: Vec<Id>,
    },
    /// The write has been answered.
    Written { number: u64, is_durable: bool },
    /// A flush is about to be requested.
    Flush { number: u64, disk: usize },
    /// The flush has been answered.
    Flushed { number: u64 },
}

impl Event {
    /// Returns it as a line of a log.
    pub fn line(&self) -> String {
        let mut line = match self {
            Self::Write {
                number,
                disk,
                first,
                ids: _,
            } => format!("write {number} {disk} {first}"),
            Self::Written { number, is_durable } => {
                format!("written {number} {}", u64::from(*is_durable))
            }
            Self::Flush { number, disk } => format!("flush {number} {disk}"),
            Self::Flushed { number } => format!("flushed {number}"),
        };
        if let Self::Write { ids, .. } = self {
            for id in ids {
                let _ = write!(line, " {id}");
            }
        }
        line.push('\n');
        line
    }

    /// Parses such a line.
    pub fn parse(line: &str) -> Option<Self> {
        let (what, numbers) = line.trim_end().split_once(' ')?;
        let numbers: Result<Vec<u64>, _> = numbers.split(' ').map(str::parse).collect();
        let numbers = numbers.ok()?;
        Some(match (what, numbers.as_slice()) {
            ("write", &[number, disk, first, ref ids @ ..]) => Self::Write {
                number,
                disk: disk as usize,
                first,
                ids: ids.to_vec(),
            },
            ("written", &[number, is_durable]) => Self::Written {
                number,
                is_durable: is_durable != 0,
            },
            ("flush", &[number, disk]) => Self::Flush {
                number,
                disk: disk as usize,
            },
            ("flushed", &[number]) => Self::Flushed { number },
            _ => return None,
        })
    }
}

/// Possible content of a sector.
#[derive(Clone, Copy, Debug)]
struct Legal {
    id: Id,
    /// Write that made it, and time of the answer.
    write: u64,
    done: Option<u64>,
}

/// Write that has begun.
#[derive(Clone, Copy, Debug)]
struct Begun {
    disk: usize,
    first: u64,
    sectors: u64,
}

/// Possible contents of the disks' sectors: for each, the content of the last write that a flush
/// (or the write itself) made durable, and those written since. Writes to one sector follow each
/// other: the requester waits for the answer.
pub struct Oracle {
    disks: Vec<Vec<Vec<Legal>>>,
    writes: HashMap<u64, Begun>,
    /// Time of each flush's request, and its disk.
    flushes: HashMap<u64, (u64, usize)>,
    /// Number of events so far.
    now: u64,
}

impl Oracle {
    /// Creates an oracle of `disks` disks of zeroes.
    pub fn new(disks: usize, sectors: u64) -> Self {
        let zeroes = Legal {
            id: 0,
            write: 0,
            done: Some(0),
        };
        Self {
            disks: vec![vec![vec![zeroes]; sectors as usize]; disks],
            writes: HashMap::new(),
            flushes: HashMap::new(),
            now: 0,
        }
    }

    /// Records the next event.
    pub fn record(&mut self, event: &Event) {
        self.now += 1;
        match *event {
            Event::Write {
                number,
                disk,
                first,
                ref ids,
            } => {
                let begun = Begun {
                    disk,
                    first,
                    sectors: ids.len() as u64,
                };
                for (legal, &id) in self.sectors(begun).zip(ids) {
                    legal.push(Legal {
                        id,
                        write: number,
                        done: None,
                    });
                }
                self.writes.insert(number, begun);
            }
            Event::Written { number, is_durable } => {
                let now = self.now;
                let begun = self.writes.remove(&number).expect("a write is begun first");
                for legal in self.sectors(begun) {
                    let at = legal.iter().position(|legal| legal.write == number);
                    let at = at.expect("of each of its sectors");
                    legal[at].done = Some(now);
                    if is_durable {
                        legal.drain(..at);
                    }
                }
            }
            Event::Flush { number, disk } => {
                self.flushes.insert(number, (self.now, disk));
            }
            Event::Flushed { number } => {
                let begun = self.flushes.remove(&number);
                let (since, disk) = begun.expect("a flush is begun first");
                for legal in &mut self.disks[disk] {
                    let is_flushed = |legal: &Legal| legal.done.is_some_and(|done| done < since);
                    let last = legal.iter().rposition(is_flushed);
                    legal.drain(..last.unwrap_or(0));
                }
            }
        }
    }

    fn sectors(&mut self, of: Begun) -> impl Iterator<Item = &mut Vec<Legal>> {
        let sectors = of.first as usize..(of.first + of.sectors) as usize;
        self.disks[of.disk][sectors].iter_mut()
    }

    /// Checks that a disk may have this content.
    pub fn check(&self, disk: usize, image: &[u8]) -> Result<(), String> {
        let sectors = image.chunks(SECTOR).zip(&self.disks[disk]);
        for (number, (bytes, legal)) in sectors.enumerate() {
            let words: Vec<u64> = bytes
                .chunks(8)
                .map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")))
                .collect();
            let is_one = words.iter().all(|word| *word == words[0]);
            if !is_one || !legal.iter().any(|legal| legal.id == words[0]) {
                let words = &words[..if is_one { 1 } else { words.len() }];
                return Err(format!(
                    "disk {disk}, sector {number}: {words:?}; legal are {legal:?}"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(number: u64, first: u64, ids: &[Id]) -> Event {
        Event::Write {
            number,
            disk: 0,
            first,
            ids: ids.to_vec(),
        }
    }

    fn written(number: u64, is_durable: bool) -> Event {
        Event::Written { number, is_durable }
    }

    /// Returns which of 0, 7, 8, 9 the first sector may have.
    fn legal(oracle: &Oracle) -> Vec<Id> {
        let may = |id: &Id| {
            let image: Vec<u8> = std::iter::repeat_n(id.to_le_bytes(), SECTOR / 8)
                .flatten()
                .collect();
            oracle.check(0, &image).is_ok()
        };
        [0, 7, 8, 9].into_iter().filter(may).collect()
    }

    fn after(events: &[Event]) -> Vec<Id> {
        let mut oracle = Oracle::new(1, 4);
        events.iter().for_each(|event| oracle.record(event));
        legal(&oracle)
    }

    #[test]
    fn unflushed_writes_may_be_found_or_not() {
        assert_eq!(after(&[write(1, 0, &[7])]), [0, 7]);
        assert_eq!(after(&[write(1, 0, &[7]), written(1, false)]), [0, 7]);
        let two = [write(1, 0, &[7]), written(1, false), write(2, 0, &[8])];
        assert_eq!(after(&two), [0, 7, 8]);
    }

    #[test]
    fn a_flush_holds_what_was_answered_before_it_was_asked_for() {
        let number = 5;
        let flush = Event::Flush { number, disk: 0 };
        let events = [
            write(1, 0, &[7]),
            written(1, false),
            write(2, 0, &[8]),
            flush,
            written(2, false),
            Event::Flushed { number },
        ];
        assert_eq!(after(&events), [7, 8]);
    }

    #[test]
    fn a_durable_write_holds_when_it_is_answered() {
        assert_eq!(after(&[write(1, 0, &[7]), written(1, true)]), [7]);
    }

    #[test]
    fn a_torn_sector_is_nothing() {
        let mut image = vec![0; SECTOR];
        image[SECTOR - 1] = 1;
        let error = Oracle::new(1, 1).check(0, &image).unwrap_err();
        assert!(error.contains("sector 0"), "{error}");
    }

    #[test]
    fn events_come_back_from_a_log() {
        for event in [
            write(1, 8, &[7, 8]),
            written(1, true),
            Event::Flush { number: 2, disk: 1 },
            Event::Flushed { number: 2 },
        ] {
            assert_eq!(Event::parse(&event.line()), Some(event));
        }
        assert_eq!(Event::parse("write 1"), None);
        assert_eq!(Event::parse(""), None);
    }
}
