//! Whatever a power cut leaves of the writes since the last sync, everything that was flushed is
//! there.
//!
//! An image lives in a [`Recorder`]. Random operations run on it; then every window between two
//! syncs is replayed: what was synced is there, and of what was written in the window some sectors
//! are there and others are not. All windows are cut at every write (*prefix*), with each write
//! missing alone (*omission*) and alone there (*survivor*), and with random choices of writes and
//! of single sectors. In each state
//!
//! - a reader that shares no code with the library finds no corruption, leaks aside;
//! - each sector of the disk has its contents at the last flush that was reported done, or contents
//!   that were written after it: never what was there before, nor another sector's, nor what the
//!   cluster held in an earlier life;
//! - in samples of the states the crate's own check finds nothing to mend, the library reads the
//!   same, and so does `qemu-img check` find no more than leaks.

use std::collections::HashMap;
use std::fs::File;
use std::path::PathBuf;
use std::process::Command;

use imago::FormatCreateBuilder;
use imago::qcow2::Qcow2;
use seeded::Random;
use tempfile::TempDir;

use super::naive::{self, ClusterLocation};
use super::recorder::{Event, Recorder, SECTOR};
use crate::chain;
use crate::check::check;
use crate::header::{self, Layout};
use crate::image::{Group, Image};
use crate::options::{Backing, ImageOptions};
use crate::storage::{Content, ImageFile};

/// Word that fills a sector. It names the sector and the write; 0 is no write's.
type Word = u64;

/// The write that made the backing file.
const BEHIND: u64 = 1 << 30;

fn word(write: u64, sector: usize) -> Word {
    write << 32 | sector as u64
}

fn fill(bytes: &mut [u8], word: Word) {
    for chunk in bytes.chunks_exact_mut(8) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
}

/// The word of a sector; one that is a mixture has none.
fn read_word(sector: &[u8]) -> Option<Word> {
    let word = u64::from_le_bytes(*sector.first_chunk()?);
    // Each word is the one before it.
    (sector[8..] == sector[..sector.len() - 8]).then_some(word)
}

/// Parameters of the making of an image.
#[derive(Clone, Copy, Debug)]
struct Shape {
    cluster: usize,
    refcount_bits: usize,
    /// Sectors of the disk.
    sectors: usize,
    version: u8,
    has_backing: bool,
    /// Sectors written and synced before the recording begins.
    written: usize,
    made_by: Maker,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Maker {
    Library,
    /// qemu-img, with an internal snapshot of what is written.
    Snapshot,
    /// qemu-img, what is written being compressed.
    Compressed,
}

const PLAIN: Shape = Shape {
    cluster: 512,
    refcount_bits: 16,
    sectors: 192,
    version: 3,
    has_backing: false,
    written: 0,
    made_by: Maker::Library,
};

fn qemu_img(line: &str) -> std::io::Result<std::process::Output> {
    Command::new("qemu-img")
        .args(line.split_whitespace())
        .output()
}

fn has_qemu() -> bool {
    let found = qemu_img("--version").is_ok();
    if !found {
        println!("skipped: no qemu-img on the PATH (Debian: qemu-utils)");
    }
    found
}

fn words_of(sectors: usize, write: u64) -> Vec<u8> {
    let mut bytes = vec![0; sectors * SECTOR];
    for (at, sector) in bytes.chunks_exact_mut(SECTOR).enumerate() {
        fill(sector, word(write, at));
    }
    bytes
}

/// Makes the image in a folder of its own, and its backing file.
fn make(shape: &Shape) -> (TempDir, PathBuf) {
    // In memory where that is: files are written over thousands of times.
    let memory = std::path::Path::new("/dev/shm");
    let folder = match memory.is_dir() {
        true => tempfile::tempdir_in(memory),
        false => tempfile::tempdir(),
    };
    let folder = folder.expect("a folder");
    let path = folder.path().join("disk.qcow2");
    let base = folder.path().join("base.raw");
    std::fs::write(&base, words_of(shape.sectors, BEHIND)).expect("written");
    let size = shape.sectors * SECTOR;
    if shape.made_by == Maker::Library {
        let file = File::create_new(&path).expect("a new file");
        let storage = ImageFile::new(Box::new(file), path.clone(), 0, Content::Raw);
        let mut builder = Qcow2::<ImageFile>::create_builder(storage)
            .cluster_size(shape.cluster)
            .refcount_width(shape.refcount_bits)
            .size(size as u64);
        if shape.has_backing {
            builder = builder.backing("base.raw".into(), "raw".into());
        }
        builder.create().expect("an image");
        if shape.version == 2 {
            use std::os::unix::fs::FileExt;
            let file = File::options()
                .write(true)
                .open(&path)
                .expect("it is there");
            file.write_all_at(&2_u32.to_be_bytes(), 4).expect("written");
        }
        return (folder, path);
    }
    let raw = folder.path().join("first.raw");
    let mut bytes = words_of(shape.written, 1);
    bytes.resize(size, 0);
    std::fs::write(&raw, bytes).expect("written");
    let compress = if shape.made_by == Maker::Compressed {
        "-c"
    } else {
        ""
    };
    let options = format!(
        "cluster_size={},refcount_bits={}",
        shape.cluster, shape.refcount_bits
    );
    let mut lines = vec![format!(
        "convert {compress} -f raw -O qcow2 -o {options} {} {}",
        raw.display(),
        path.display()
    )];
    if shape.made_by == Maker::Snapshot {
        lines.push(format!("snapshot -c first {}", path.display()));
    }
    for line in lines {
        let output = qemu_img(&line).expect("looked for before");
        assert!(output.status.success(), "{line}: {output:?}");
    }
    (folder, path)
}

/// Contents that the sectors of the disk may have.
struct Model {
    /// Of each sector: when a write of it began, and what it wrote. In order.
    history: Vec<Vec<(usize, Word)>>,
    /// Numbers of events after which flushes were reported done.
    flushes: Vec<usize>,
    writes: u64,
}

impl Model {
    fn new(shape: &Shape) -> Self {
        let first = |at| match shape.made_by {
            Maker::Library if shape.has_backing => word(BEHIND, at),
            Maker::Snapshot | Maker::Compressed if at < shape.written => word(1, at),
            _ => 0,
        };
        Self {
            history: (0..shape.sectors).map(|at| vec![(0, first(at))]).collect(),
            flushes: vec![0],
            writes: 1,
        }
    }

    /// Returns the contents that a power cut may leave after `events` events: of each sector, the
    /// content at the last flush and everything written since.
    fn allowed(&self, events: usize) -> Vec<Vec<Word>> {
        let flushed = self.flushes.iter().rev().find(|flush| **flush <= events);
        let flushed = *flushed.expect("the first is at 0");
        let of = |history: &Vec<(usize, Word)>| {
            let last = history.iter().rposition(|(begun, _)| *begun <= flushed);
            let last = last.expect("the first is at 0");
            history[last..]
                .iter()
                .filter(|(begun, _)| *begun <= events)
                .map(|(_, word)| *word)
                .collect()
        };
        self.history.iter().map(of).collect()
    }
}

/// A run of operations on an image, recorded.
struct Run {
    shape: Shape,
    _folder: TempDir,
    path: PathBuf,
    recorder: Recorder,
    image: Image,
    model: Model,
    random: Random,
}

impl Run {
    fn new(shape: Shape, barriers: bool, seed: u64) -> Self {
        let (folder, path) = make(&shape);
        let options = ImageOptions {
            backing: Backing::Follow,
            barriers,
            ..ImageOptions::default()
        };
        let recorder = std::cell::OnceCell::new();
        let opened = chain::open_through(&path, &options, &|mut file| {
            // The first is the image itself.
            match recorder.get() {
                Some(_) => Box::new(file),
                None => Box::new(recorder.get_or_init(|| Recorder::load(&mut file)).clone()),
            }
        });
        let image = Image::new(opened.expect("it opens"));
        let mut run = Self {
            model: Model::new(&shape),
            shape,
            _folder: folder,
            path,
            recorder: recorder.into_inner().expect("the image was opened"),
            image,
            random: Random::new(seed),
        };
        if shape.made_by == Maker::Library {
            for first in (0..shape.written).step_by(64) {
                run.write(&[(first, 64.min(shape.written - first))]);
            }
        }
        run
    }

    /// Writes, as many as a group of the workers takes: each a first sector and a number of them.
    fn write(&mut self, writes: &[(usize, usize)]) {
        let mut group = None;
        for &(first, count) in writes {
            self.model.writes += 1;
            let write = self.model.writes;
            let begun = self.recorder.mark();
            let mut data = vec![0; count * SECTOR];
            for (at, sector) in data.chunks_exact_mut(SECTOR).enumerate() {
                let word = word(write, first + at);
                fill(sector, word);
                self.model.history[first + at].push((begun, word));
            }
            let offset = (first * SECTOR) as u64;
            if group.is_none() && self.image.overwrite(offset, &data).expect("no error") {
                continue;
            }
            let group: &mut Group<'_> =
                group.get_or_insert_with(|| self.image.group().expect("the image"));
            group.write(offset, &data).expect("no error");
        }
        if let Some(mut group) = group {
            group.flush().expect("no error");
        }
    }

    fn flush(&mut self) {
        self.image.flush().expect("no error");
        self.model.flushes.push(self.recorder.mark());
    }

    fn range(&mut self) -> (usize, usize) {
        let first = self.random.below(self.shape.sectors as u64) as usize;
        let most = (self.shape.sectors - first).min(4 * self.shape.cluster / SECTOR + 3);
        (first, 1 + self.random.below(most as u64) as usize)
    }

    /// Makes a range zero, or gives it up.
    fn empty(&mut self, (first, count): (usize, usize), how: impl FnOnce(&Image, u64, u64)) {
        let begun = self.recorder.mark();
        for at in first..first + count {
            self.model.history[at].push((begun, 0));
        }
        how(
            &self.image,
            (first * SECTOR) as u64,
            (count * SECTOR) as u64,
        );
        // A discard may leave zeroes or the former content.
        for at in first..first + count {
            let mut sector = [1; SECTOR];
            let offset = (at * SECTOR) as u64;
            self.image.read(offset, &mut sector).expect("no error");
            let word = read_word(&sector).expect("whole");
            let before = self.model.history[at].iter().rev().nth(1);
            assert!(
                word == 0 || Some(word) == before.map(|(_, word)| *word),
                "sector {at} holds {word:#x}"
            );
            self.model.history[at].push((begun, word));
        }
    }

    fn step(&mut self) {
        match self.random.below(16) {
            0..=8 => {
                let count = 1 + self.random.below(6);
                let writes: Vec<_> = (0..count).map(|_| self.range()).collect();
                self.write(&writes);
            }
            9 | 10 => {
                let range = self.range();
                self.empty(range, |image, offset, len| {
                    image.discard(offset, len).expect("no error");
                });
            }
            kind @ 11..=13 => {
                let range = self.range();
                self.empty(range, |image, offset, len| {
                    let done = image.write_zeroes(offset, len, kind == 11);
                    done.expect("no error");
                });
            }
            _ => self.flush(),
        }
    }

    /// Nothing but the tests' own mistakes: the image holds what was written last.
    fn verify(&self) {
        let mut sector = [0; SECTOR];
        for (at, history) in self.model.history.iter().enumerate() {
            let offset = (at * SECTOR) as u64;
            self.image.read(offset, &mut sector).expect("no error");
            let last = history.last().map(|(_, word)| *word);
            assert_eq!(read_word(&sector), last, "sector {at}");
        }
    }
}

/// Record of a run, and the parameters of its replay.
struct Replay {
    shape: Shape,
    path: PathBuf,
    model: Model,
    log: Vec<Event>,
    /// The file before the first event.
    stable: Vec<u8>,
    /// Compressed clusters as they were then: entry, and data.
    compressed: HashMap<usize, (u64, Vec<u8>)>,
    random: Random,
    /// Random choices per window.
    choices: usize,
    states: usize,
    checked: usize,
    checked_by_qemu: usize,
    /// The refcount table is not where it was.
    has_moved: bool,
}

/// One state: which events of the window are there, and whether all their sectors are.
struct Choice {
    kept: Vec<bool>,
    is_torn: bool,
    name: &'static str,
}

impl Replay {
    /// Replays everything; the first state that lost something, in words.
    fn run(mut self) -> Result<Self, String> {
        let mut start = 0;
        while start < self.log.len() {
            let syncs = |event: &Event| matches!(event, Event::Sync);
            let len = self.log[start..].iter().position(syncs);
            let end = len.map_or(self.log.len(), |len| start + len);
            self.window(start, end)?;
            // All of it is on the disk.
            for at in start..end {
                apply(&mut self.stable, &self.log[at], None, |_| true);
            }
            start = end + 1;
        }
        Ok(self)
    }

    fn window(&mut self, start: usize, end: usize) -> Result<(), String> {
        let events: Vec<usize> = (start..end)
            .filter(|at| !matches!(self.log[*at], Event::Mark))
            .collect();
        let count = events.len();
        let allowed = self.model.allowed(end);
        let choice = |name, kept| Choice {
            kept,
            is_torn: false,
            name,
        };
        let mut choices: Vec<Choice> = Vec::new();
        for at in 0..=count {
            choices.push(choice("prefix", (0..count).map(|n| n < at).collect()));
        }
        for at in 0..count {
            choices.push(choice("omission", (0..count).map(|n| n != at).collect()));
            choices.push(choice("survivor", (0..count).map(|n| n == at).collect()));
        }
        for number in 0..self.choices.min(4 * count) {
            let cut = self.random.below(count as u64 + 1) as usize;
            let chance = 1 + self.random.below(7);
            choices.push(Choice {
                kept: (0..count)
                    .map(|n| n < cut && self.random.below(8) < chance)
                    .collect(),
                is_torn: number % 2 == 0,
                name: "random",
            });
        }
        let mut bytes = std::mem::take(&mut self.stable);
        for choice in choices {
            // What is changed is undone afterwards.
            let before = bytes.len();
            let mut length = before;
            let mut undo = Vec::new();
            for (_, &at) in choice.kept.iter().zip(&events).filter(|(kept, _)| **kept) {
                match &self.log[at] {
                    Event::Grow(len) => length = *len,
                    event => apply(&mut bytes, event, Some(&mut undo), |_| {
                        !choice.is_torn || self.random.below(3) != 0
                    }),
                }
            }
            // What lies beyond the length is lost.
            bytes.resize(length, 0);
            self.states += 1;
            self.judge(&bytes, &allowed).map_err(|what| {
                let kept: String = choice
                    .kept
                    .iter()
                    .map(|kept| if *kept { '1' } else { '0' })
                    .collect();
                format!(
                    "{:?}: {} of the events {start} to {end}, kept {kept}{}: {what}",
                    self.shape,
                    choice.name,
                    if choice.is_torn { " in part" } else { "" }
                )
            })?;
            bytes.truncate(before);
            let inside = |(offset, _): &(usize, _)| *offset < before;
            for (offset, sector) in undo.into_iter().filter(inside).rev() {
                let len = SECTOR.min(before - offset);
                bytes[offset..offset + len].copy_from_slice(&sector[..len]);
            }
        }
        self.stable = bytes;
        Ok(())
    }

    fn judge(&mut self, bytes: &[u8], allowed: &[Vec<Word>]) -> Result<(), String> {
        let naive = naive::walk(bytes)?;
        let mut found = Vec::with_capacity(allowed.len());
        for (at, allowed) in allowed.iter().enumerate() {
            let offset = at * SECTOR;
            let place = naive.places[offset / naive.cluster];
            let word = match place {
                ClusterLocation::Zero => 0,
                ClusterLocation::Behind if self.shape.has_backing => word(BEHIND, at),
                ClusterLocation::Behind => 0,
                ClusterLocation::At(host) => {
                    let host = host + offset % naive.cluster;
                    // The file may end within its last cluster.
                    let mut sector = [0; SECTOR];
                    let rest = bytes.get(host..).unwrap_or_default();
                    let len = rest.len().min(SECTOR);
                    sector[..len].copy_from_slice(&rest[..len]);
                    read_word(&sector).ok_or_else(|| format!("sector {at} is a mixture"))?
                }
                ClusterLocation::Compressed(entry) => {
                    let now = naive.compressed_data(bytes, entry);
                    match self.compressed.get(&(offset / naive.cluster)) {
                        Some((before, data)) if *before == entry && data == now => {
                            self.model.history[at][0].1
                        }
                        _ => return Err(format!("the compressed data of sector {at} changed")),
                    }
                }
            };
            if !allowed.contains(&word) {
                return Err(format!(
                    "sector {at} holds {word:#x}, and may hold {allowed:x?}"
                ));
            }
            found.push(word);
        }
        if self.states % 64 == 1 {
            self.judge_by_the_crate(bytes, &found)?;
        }
        if self.states % 4096 == 1 {
            self.judge_by_qemu(bytes)?;
        }
        Ok(())
    }

    fn judge_by_the_crate(&mut self, bytes: &[u8], found: &[Word]) -> Result<(), String> {
        self.checked += 1;
        let recorder = Recorder::of(bytes.to_vec());
        let len = bytes.len() as u64;
        let header = header::read(&recorder, len).map_err(|error| error.to_string())?;
        let layout = Layout::parse(&header, len).map_err(|error| error.to_string())?;
        let checked = check(&recorder, &layout, len).map_err(|error| error.to_string())?;
        if checked.low != 0 {
            return Err(format!("the crate mended {} counts", checked.low));
        }
        let options = ImageOptions {
            backing: Backing::Follow,
            read_only: true,
            ..ImageOptions::default()
        };
        std::fs::write(&self.path, bytes).expect("written");
        let image = chain::open_through(&self.path, &options, &|file| Box::new(file));
        let image = Image::new(image.map_err(|error| format!("{error:?}"))?);
        let mut disk = vec![0; self.shape.sectors * SECTOR];
        image
            .read(0, &mut disk)
            .map_err(|error| error.to_string())?;
        for (at, sector) in disk.chunks_exact(SECTOR).enumerate() {
            if read_word(sector) != Some(found[at]) {
                return Err(format!("the library reads something else in sector {at}"));
            }
        }
        Ok(())
    }

    fn judge_by_qemu(&mut self, bytes: &[u8]) -> Result<(), String> {
        std::fs::write(&self.path, bytes).expect("written");
        let Ok(output) = qemu_img(&format!("check {}", self.path.display())) else {
            return Ok(());
        };
        self.checked_by_qemu += 1;
        // 3: leaks.
        if !matches!(output.status.code(), Some(0 | 3)) {
            return Err(format!(
                "qemu-img check: {}{}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            ));
        }
        Ok(())
    }
}

/// Sectors to write back to undo changes, last first: offsets, and the former contents.
type Undo = Vec<(usize, [u8; SECTOR])>;

fn apply(
    bytes: &mut Vec<u8>,
    event: &Event,
    mut undo: Option<&mut Undo>,
    mut is_kept: impl FnMut(usize) -> bool,
) {
    let sectors = match event {
        Event::Sync | Event::Mark => return,
        Event::Grow(len) => return bytes.resize(*len, 0),
        Event::Write(sectors) => sectors,
    };
    for (at, sector) in sectors {
        if !is_kept(*at) {
            continue;
        }
        let offset = at * SECTOR;
        let len = bytes.len();
        if len < offset + SECTOR {
            bytes.resize(offset + SECTOR, 0);
        }
        let place = &mut bytes[offset..offset + SECTOR];
        if offset < len
            && let Some(undo) = &mut undo
        {
            let mut before = [0; SECTOR];
            before.copy_from_slice(place);
            undo.push((offset, before));
        }
        place.copy_from_slice(&sector[..]);
    }
}

/// Runs `steps` operations on an image and replays them.
fn replay(
    shape: Shape,
    barriers: bool,
    seed: u64,
    steps: usize,
    choices: usize,
) -> Result<Replay, String> {
    let mut run = Run::new(shape, barriers, seed);
    run.verify();
    run.flush();
    // Drop the earlier events: the recording begins on the disk.
    run.recorder.take_log();
    run.model.flushes = vec![0];
    for history in &mut run.model.history {
        let last = history.last().map(|(_, word)| (0, *word));
        *history = last.into_iter().collect();
    }
    let stable = run.recorder.bytes();
    let naive = naive::walk(&stable).expect("sound before");
    let mut compressed = HashMap::new();
    for (at, place) in naive.places.iter().enumerate() {
        if let ClusterLocation::Compressed(entry) = *place {
            let data = naive.compressed_data(&stable, entry).to_vec();
            compressed.insert(at, (entry, data));
        }
    }
    for _ in 0..steps {
        run.step();
    }
    run.verify();
    let path = run.path.with_file_name("cut.qcow2");
    let log = run.recorder.take_log();
    let table = |bytes: &[u8]| bytes[48..56].to_vec();
    let has_moved = table(&stable) != table(&run.recorder.bytes());
    let Run {
        shape,
        _folder: folder,
        model,
        image,
        ..
    } = run;
    drop(image);
    let done = Replay {
        shape,
        path,
        model,
        log,
        stable,
        compressed,
        random: Random::new(seed + 1),
        choices,
        states: 0,
        checked: 0,
        checked_by_qemu: 0,
        has_moved,
    }
    .run();
    drop(folder);
    done
}

/// Shapes whose every order is replayed, without QEMU.
fn shapes() -> Vec<Shape> {
    let backed = Shape {
        has_backing: true,
        ..PLAIN
    };
    let large = Shape {
        cluster: 4096,
        sectors: 1 << 10,
        ..PLAIN
    };
    vec![
        PLAIN,
        backed,
        Shape {
            version: 2,
            ..PLAIN
        },
        Shape {
            refcount_bits: 1,
            ..PLAIN
        },
        large,
        Shape {
            has_backing: true,
            ..large
        },
        Shape {
            has_backing: true,
            refcount_bits: 64,
            ..large
        },
    ]
}

fn replay_all(shapes: &[Shape], seeds: std::ops::Range<u64>, steps: usize, choices: usize) {
    for shape in shapes {
        let (mut states, mut checked, mut by_qemu) = (0, 0, 0);
        for seed in seeds.clone() {
            let done = replay(*shape, true, seed, steps, choices)
                .unwrap_or_else(|what| panic!("seed {seed}: {what}"));
            states += done.states;
            checked += done.checked;
            by_qemu += done.checked_by_qemu;
        }
        println!("{shape:?}: {states} states, {checked} opened, {by_qemu} by qemu-img");
        assert!(checked > 0);
    }
}

#[test]
fn flushed_data_survive_a_power_cut() {
    replay_all(&shapes(), 0..2, 60, 24);
}

/// Likewise while the refcount table is moved to make it longer. (The library never needs to move
/// an L1 table: one that is too short for its disk is refused when the image is opened.)
#[test]
fn flushed_data_survive_a_power_cut_while_the_refcount_table_grows() {
    // 64 entries of the table, 64 counts in a block, 512 bytes in a cluster: full at 2 MiB.
    let shape = Shape {
        refcount_bits: 64,
        sectors: 4600,
        written: 3960,
        ..PLAIN
    };
    for seed in 0..3 {
        let done = replay(shape, true, seed, 40, 24);
        let done = done.unwrap_or_else(|what| panic!("seed {seed}: {what}"));
        assert!(done.has_moved, "the table did not grow");
    }
    assert!((0..3).any(|seed| replay(shape, false, seed, 40, 24).is_err()));
}

/// Likewise of images that share clusters with a snapshot, and of compressed ones: there every
/// write takes the place of older data.
#[test]
fn flushed_data_survive_a_power_cut_where_clusters_are_shared_or_compressed() {
    if !has_qemu() {
        return;
    }
    for made_by in [Maker::Snapshot, Maker::Compressed] {
        let small = Shape {
            made_by,
            written: 150,
            ..PLAIN
        };
        let large = Shape {
            made_by,
            cluster: 4096,
            sectors: 1 << 10,
            written: 800,
            ..PLAIN
        };
        replay_all(&[small, large], 0..2, 60, 24);
        assert!((0..20).any(|seed| replay(small, false, seed, 60, 24).is_err()));
    }
}

/// The replay is worth something: what the option leaves out is found missing.
#[test]
fn without_barriers_a_power_cut_loses_what_was_flushed() {
    for shape in shapes() {
        let lost = (0..20).find_map(|seed| replay(shape, false, seed, 60, 24).err());
        println!("{}", lost.expect("something is lost"));
    }
}

/// Data that a cluster took over from behind when a part of it was written: the oldest data there
/// are.
#[test]
fn rest_of_a_cluster_survives_a_power_cut_under_a_sub_cluster_write() {
    let shape = Shape {
        cluster: 4096,
        sectors: 64,
        has_backing: true,
        ..PLAIN
    };
    let cut = |barriers| {
        let mut run = Run::new(shape, barriers, 0);
        // The L2 table and its first entry.
        run.write(&[(0, 1)]);
        run.flush();
        run.recorder.take_log();
        let mut stable = run.recorder.bytes();
        run.write(&[(11, 2)]);
        let now = naive::walk(&run.recorder.bytes())?;
        let ClusterLocation::At(data) = now.places[1] else {
            return Err(format!("the cluster is {:?}", now.places[1]));
        };
        // The disk has everything but those data, unless they were synced.
        let log = run.recorder.take_log();
        let synced = log.iter().rposition(|event| matches!(event, Event::Sync));
        for (at, event) in log.iter().enumerate() {
            apply(&mut stable, event, None, |sector| {
                Some(at) < synced || !(data..data + shape.cluster).contains(&(sector * SECTOR))
            });
        }
        let naive = naive::walk(&stable)?;
        let ClusterLocation::At(host) = naive.places[1] else {
            return Err(format!("the cluster is {:?}", naive.places[1]));
        };
        for at in [8, 9, 10, 13, 14, 15] {
            let sector = &stable[host + (at - 8) * SECTOR..][..SECTOR];
            if read_word(sector) != Some(word(BEHIND, at)) {
                return Err(format!("sector {at} holds {:x?}", read_word(sector)));
            }
        }
        Ok(())
    };
    assert_eq!(cut(true), Ok(()));
    let lost = cut(false).expect_err("the data are not on the disk");
    assert_eq!(lost, "sector 8 holds Some(0)");
}

/// Counts the syncs that barriers cost.
#[test]
fn barriers_are_where_the_format_needs_them() {
    let shape = Shape {
        cluster: 4096,
        sectors: 1 << 10,
        ..PLAIN
    };
    let mut run = Run::new(shape, true, 0);
    // The first L2 table; all others are in it.
    run.write(&[(0, 8)]);
    run.flush();
    let mut syncs = {
        let recorder = run.recorder.clone();
        let mut last = recorder.syncs();
        move || {
            let now = recorder.syncs();
            std::mem::replace(&mut last, now).abs_diff(now)
        }
    };
    let fresh: Vec<_> = (1..33).map(|cluster| (cluster * 8 + 3, 1)).collect();
    run.write(&fresh);
    assert_eq!(
        syncs(),
        1,
        "a group of writes that need clusters shares a sync"
    );
    run.write(&fresh);
    assert_eq!(syncs(), 0, "clusters that are there need none");
    run.flush();
    assert_eq!(syncs(), 1, "a flush is one, whatever was before");
    run.empty((8, 64), |image, offset, len| {
        image.discard(offset, len).expect("no error")
    });
    assert_eq!(
        syncs(),
        1,
        "between what referred to the clusters and their counts"
    );
    // Their entries say "zero" now, without clusters in waiting: no other writes' clusters become
    // free.
    run.write(&fresh);
    assert_eq!(syncs(), 1, "writes to discarded clusters share a sync");
    run.flush();
    syncs();
    run.empty((8, 64), |image, offset, len| {
        image.write_zeroes(offset, len, false).expect("no error")
    });
    assert_eq!(syncs(), 0, "hiding a cluster needs none");
}
