//! Guest's part of random episodes with faulty storage: writers that log acknowledged writes
//! ([`crate::acked`]), while the guest clears Bus Master, resets the disk or powers off when the
//! host asks for it.
//!
//! The host sends lines, and reads the guest's answers, `episode N WORD`:
//!
//! | typed | what follows | said |
//! |---|---|---|
//! | nothing yet | | `ready`, of episode 0 |
//! | `begin N kernel MAY-FAIL` | writers begin, by the kernel's driver | `ready`, once each has written |
//! | `begin N driver MAY-FAIL` | a driver in user space takes the disk | `ready` |
//! | `issue` | that one makes requests, and does not wait for them | `issued` |
//! | `act bus-master` | cleared and set again | `acting`, `acted ms=…` |
//! | `act reset` | of the disk, by that driver, with its requests in flight | `acting`, `acted ms=…` |
//! | `act power-off` | | `acting` |
//! | `finish` | writers end, the kernel has the disk, all of it is read | `over: ok …`, `over: REASON` |
//! | `quit` | the program ends | |
//!
//! A writer that finds an error says `wrong: REASON`, and ends.
//!
//! MAY-FAIL is `nothing`, `flushes` or `anything`. A read or a write that may fail is repeated
//! until it succeeds. A flush is not: a driver that has failed one flush fails all of them.

use std::io;
use std::time::Instant;

use crate::acked::{OWNED, Record, WRITERS};
use crate::device::{self, Buffer};
use crate::driver::{Driver, Request, SLOTS};
use crate::function::Function;
use crate::held::{self, HeldAction};
use crate::pattern::Random;
use crate::{BLOCK, console};

mod writer;

pub use writer::EpisodesConfig;
use writer::{Counts, Load, Log, MayFail, choose, sealed, window};

/// Executes the host's commands, until `quit`.
///
/// # Errors
/// A description of the first error; it has also been said to the host.
pub fn run(config: &EpisodesConfig) -> Result<(), String> {
    let mut session = Session::new(config)?;
    // Input that arrives before there is a driver for the console is lost.
    session.say("ready");
    loop {
        let line = console::hear()?;
        let words: Vec<&str> = line.split(' ').collect();
        let done = match *words {
            ["begin", episode, who, may_fail] => session.begin(episode, who, may_fail),
            ["issue"] => session.issue(),
            ["act", act] => session.act(act),
            ["finish"] => session.finish(),
            ["quit"] => return Ok(()),
            // An empty line is ignored.
            [""] => Ok(()),
            _ => Err(format!("what is {line:?}?")),
        };
        if let Err(reason) = done {
            session.say(&format!("over: {reason}"));
            return Err(reason);
        }
    }
}

/// Driver that makes the requests.
enum Engine {
    Idle,
    Kernel(Load),
    Driver(Box<Driver>),
}

struct Session {
    config: EpisodesConfig,
    episode: usize,
    may_fail: MayFail,
    records: Vec<Record>,
    engine: Engine,
    random: Random,
}

impl Session {
    /// Stores records in which nothing was written.
    fn new(config: &EpisodesConfig) -> Result<Self, String> {
        let session = Self {
            config: config.clone(),
            episode: 0,
            may_fail: MayFail::Nothing,
            records: (0..WRITERS).map(Record::new).collect(),
            engine: Engine::Idle,
            random: Random::new(config.seed),
        };
        let log = Log::open(config)?;
        for record in &session.records {
            log.put(record)?;
        }
        Ok(session)
    }

    fn say(&self, word: &str) {
        console::say(&format!("episode {} {word}", self.episode));
    }

    fn begin(&mut self, episode: &str, who: &str, may_fail: &str) -> Result<(), String> {
        self.episode = episode.parse().map_err(|_| "no number of an episode")?;
        self.may_fail = may_fail.parse()?;
        self.engine = match who {
            "kernel" => Engine::Kernel(Load::start(
                &self.config,
                self.episode,
                self.may_fail,
                std::mem::take(&mut self.records),
                &mut self.random,
            )?),
            "driver" => {
                let mut function = self.function()?;
                function.take().map_err(|e| e.to_string())?;
                let driver = Driver::start(function).map_err(|e| e.to_string())?;
                Engine::Driver(Box::new(driver))
            }
            _ => return Err(format!("nobody is called {who:?}")),
        };
        self.say("ready");
        Ok(())
    }

    fn function(&self) -> Result<Function, String> {
        Function::of_disk(&self.config.disk).map_err(|e| e.to_string())
    }

    /// Submits a read and three writes, and does not wait for them.
    fn issue(&mut self) -> Result<(), String> {
        if let Engine::Driver(driver) = &mut self.engine {
            const {
                assert!(
                    SLOTS > WRITERS as usize - 1,
                    "a slot for each writer but one"
                )
            };
            for (slot, record) in (1..SLOTS).zip(&self.records) {
                driver.set_data(slot, &sealed(record, self.config.seed));
                let write = Request::Write(record.block(record.next().index));
                driver.submit(slot, write).map_err(|e| e.to_string())?;
            }
            let read = Request::Read(self.records[0].block(0));
            driver.submit(0, read).map_err(|e| e.to_string())?;
        }
        self.say("issued");
        Ok(())
    }

    fn act(&mut self, act: &str) -> Result<(), String> {
        let start = Instant::now();
        self.say("acting");
        if act == HeldAction::PowerOff.name() {
            if let Engine::Kernel(load) = &self.engine {
                load.power_goes();
            }
            return held::power_off();
        } else if act == HeldAction::BusMaster.name() {
            let function = self.function()?;
            for on in [false, true] {
                function.set_bus_master(on).map_err(|e| e.to_string())?;
            }
        } else if let (true, Engine::Driver(driver)) =
            (act == HeldAction::Reset.name(), &mut self.engine)
        {
            driver.reset().map_err(|e| e.to_string())?;
            // The device must not write this memory from here on.
            driver.set_data(0, &CANARY);
        } else {
            return Err(format!("no act {act:?} now"));
        }
        self.say(&format!("acted ms={}", start.elapsed().as_millis()));
        Ok(())
    }

    fn finish(&mut self) -> Result<(), String> {
        let counts = match std::mem::replace(&mut self.engine, Engine::Idle) {
            Engine::Idle => Counts::default(),
            Engine::Kernel(load) => {
                let (records, counts) = load.end()?;
                self.records = records;
                counts
            }
            Engine::Driver(driver) => {
                self.after_reset(*driver)?;
                Counts::default()
            }
        };
        self.read_all()?;
        let Counts { writes, failed } = counts;
        self.say(&format!("over: ok writes={writes} failed={failed}"));
        Ok(())
    }

    /// Determines which of the writes in flight at a reset reached the disk. Later episodes rely on
    /// the content read here.
    fn after_reset(&mut self, mut driver: Driver) -> Result<(), String> {
        let failed = |error: io::Error| error.to_string();
        if driver.data(0) != CANARY {
            return Err("a read that was in flight at the reset arrived after it".into());
        }
        driver.start_again().map_err(failed)?;
        let log = Log::open(&self.config)?;
        let seed = self.config.seed;
        for record in &mut self.records[..SLOTS - 1] {
            let index = record.next().index;
            driver
                .do_now(Request::Read(record.block(index)))
                .map_err(failed)?;
            let data = driver.data(0);
            let next = choose(&mut self.random, window(self.episode));
            match record.is_next(index, &data, seed) {
                true => record.acknowledge(next),
                false => {
                    record.check(index, &data, seed)?;
                    record.give_up(next);
                }
            }
            log.put(record)?;
        }
        if driver.needs_reset().map_err(failed)? {
            return Err("the disk asks for a reset".into());
        }
        driver
            .end()
            .and_then(|mut function| function.give_back(&self.config.disk))
            .map_err(|e| format!("the disk does not go back to the kernel's driver: {e}"))
    }

    /// Checks that every block holds the content of its last acknowledged write.
    fn read_all(&self) -> Result<(), String> {
        let file = device::open(&self.config.disk, false).map_err(|e| e.to_string())?;
        let mut buffer = Buffer::new(WRITERS as usize * BLOCK);
        for index in 0..OWNED {
            let first = self.records[0].block(index);
            device::read(&file, first, &mut buffer).map_err(|e| e.to_string())?;
            for (record, data) in self.records.iter().zip(buffer.bytes().chunks(BLOCK)) {
                record.check(index, data, self.config.seed)?;
            }
        }
        Ok(())
    }
}

/// Content that no write has.
const CANARY: [u8; BLOCK] = [0xa5; BLOCK];

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn on_files() -> (PathBuf, EpisodesConfig) {
        let dir = std::env::temp_dir().join(format!("workload-episodes-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = |name: &str, blocks: u64| {
            let path = dir.join(name);
            let file = std::fs::File::create(&path).unwrap();
            file.set_len(blocks * BLOCK as u64).unwrap();
            path
        };
        let config = EpisodesConfig {
            disk: file("disk", crate::acked::BLOCKS),
            log: file("log", crate::acked::LOG_BLOCKS),
            seed: 4,
        };
        (dir, config)
    }

    #[test]
    fn log_matches_the_disk_after_each_episode() {
        let (dir, config) = on_files();
        let mut session = Session::new(&config).unwrap();
        for episode in 1..=3 {
            session
                .begin(&episode.to_string(), "kernel", "nothing")
                .unwrap();
            session.finish().unwrap();
        }
        let read = |path| std::fs::read(path).unwrap();
        let (disk, log) = (read(&config.disk), read(&config.log));
        let writes = crate::acked::judge(&disk, &log, config.seed).unwrap();
        assert!(writes >= 3 * WRITERS, "{writes}");
        // The same disk with an acknowledged write lost.
        let lost = vec![0; disk.len()];
        assert!(crate::acked::judge(&lost, &log, config.seed).is_err());
        std::fs::remove_dir_all(dir).unwrap();
    }
}
