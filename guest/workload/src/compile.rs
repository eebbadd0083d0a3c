//! Memory use of a compiler, unit by unit: a source and headers are read through the page cache, a
//! process of its own fills memory that it frees at its end, and an object is written. At the end
//! all objects are read, as a linker does.
//!
//! A unit's source is a run of blocks anywhere on the disk; its headers are of those that all units
//! share. All reads are checked against the pattern, the memory of a process against the content
//! that it stored, and objects against the blocks read for them.
//!
//! After the paper's Kernbench. Left out: a file system, and time.

use std::path::PathBuf;

use crate::area::Area;
use crate::child::{self, Child, ChildExit};
use crate::pattern::{self, Checksum, Random};
use crate::phases::{self, Phases};
use crate::{BLOCK, age, block};

/// Blocks of a source, a header or an object: 4 to 64 KiB.
const RUN_MAX: u64 = 16;
/// Headers of a unit.
const HEADERS: u64 = 24;
/// Reciprocal of the part of the disk, in front, that headers begin in: a quarter.
const HEADERS_PART: u64 = 4;
/// Largest heap of a unit's process, in MiB; the smallest is 1.
const HEAP_MAX: u64 = 12;
/// Blocks of output for each unit: the most that an object may have.
const OUTPUT: u64 = RUN_MAX;

/// Configuration of a run.
#[derive(Debug, Clone)]
pub struct CompileConfig {
    /// The disk, or a file; has the pattern in front.
    pub disk: PathBuf,
    /// MiB of the pattern.
    pub mib: u64,
    /// Number of units.
    pub units: u64,
    /// Number of phases; one more follows, which reads all objects.
    pub phases: u64,
    /// Seed of the pattern, and of all random choices.
    pub seed: u64,
}

/// An object that was written: its blocks, and the generation that they are sealed with.
#[derive(Debug)]
struct Object {
    first: u64,
    blocks: u64,
    generation: u64,
}

/// Compiles all units, and links them. Calls `mark` before each phase and after the last. Returns
/// the checksum of all content read, or `None` where memory was too short.
///
/// # Errors
/// The first wrong byte, or the system's error, as text.
pub fn run(config: &CompileConfig, mark: &mut dyn FnMut(u8)) -> Result<Option<u64>, String> {
    let output = config.units.checked_mul(OUTPUT);
    let output = output.ok_or_else(|| format!("{} units are too many", config.units))?;
    let area = Area::open(&config.disk, config.mib, output, config.seed)?;
    phases::run(config.phases + 1, mark, |phases| {
        compile(config, &area, phases)
    })
}

fn compile(
    config: &CompileConfig,
    area: &Area,
    phases: &mut Phases<'_>,
) -> Result<Option<u64>, String> {
    let mut random = Random::new(config.seed);
    let mut objects = Vec::new();
    let mut sum = Checksum::default();
    for phase in 0..config.phases {
        phases.begin();
        let of = |phase| config.units * phase / config.phases;
        for unit in of(phase)..of(phase + 1) {
            let generation = sources(area, &mut random)?;
            sum.add(&generation.to_le_bytes());
            let mib = 1 + random.below(HEAP_MAX);
            if !heap(mib, generation)? {
                return Ok(None);
            }
            objects.push(put_out(config, area, unit, generation, &mut random)?);
        }
    }
    phases.begin();
    area.sync()?;
    for object in &objects {
        for number in object.first..object.first + object.blocks {
            area.read_sealed(number, object.generation)?;
        }
    }
    Ok(Some(sum.value()))
}

/// Reads a source and its headers. Returns their checksum.
fn sources(area: &Area, random: &mut Random) -> Result<u64, String> {
    let mut sum = Checksum::default();
    let mut buffer = [0; RUN_MAX as usize * BLOCK];
    let headers = (area.input / HEADERS_PART).max(1);
    for of in [area.input]
        .into_iter()
        .chain((0..HEADERS).map(|_| headers))
    {
        let first = random.below(of);
        let blocks = (1 + random.below(RUN_MAX)).min(area.input - first);
        let data = &mut buffer[..blocks as usize * BLOCK];
        area.read(first, data)?;
        for block in data.chunks(BLOCK) {
            // A word of each: all of them have been compared with the pattern.
            sum.add(&block[..8]);
        }
    }
    Ok(sum.value())
}

/// Runs a process that fills `mib` MiB, reads them again, and ends. Returns false if memory was too
/// short for it.
fn heap(mib: u64, seed: u64) -> Result<bool, String> {
    let pages = age::pages(mib)?;
    let mut memory = age::map(pages)?;
    let child = Child::start(|_| {
        child::offer_to_oom_killer();
        let place = |page: usize| (page * BLOCK) as u64;
        for page in 0..pages {
            pattern::fill(seed, place(page), memory.bytes_mut(page..page + 1));
        }
        let is_right = |page: usize| {
            let data = memory.bytes(page..page + 1);
            pattern::first_difference(seed, place(page), data).is_none()
        };
        u8::from(!(0..pages).all(is_right))
    });
    match age::ended(child)?.0 {
        ChildExit::Status(0) => Ok(true),
        ChildExit::Killed(libc::SIGKILL) => Ok(false),
        ChildExit::Status(1) => Err(format!("a page of {mib} MiB is not as it was stored")),
        ended => Err(format!("the process of a unit ended with {ended:?}")),
    }
}

fn put_out(
    config: &CompileConfig,
    area: &Area,
    unit: u64,
    generation: u64,
    random: &mut Random,
) -> Result<Object, String> {
    let object = Object {
        first: unit * OUTPUT,
        blocks: 1 + random.below(RUN_MAX),
        generation,
    };
    let mut data = vec![0; object.blocks as usize * BLOCK];
    for (number, data) in (object.first..).zip(data.chunks_mut(BLOCK)) {
        block::seal(data, number, generation, config.seed);
    }
    area.write(object.first, &data)?;
    Ok(object)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::area::tests::{Image, SEED};

    fn config(image: &Image) -> CompileConfig {
        CompileConfig {
            disk: image.0.clone(),
            mib: 2,
            units: 5,
            phases: 2,
            seed: SEED,
        }
    }

    #[test]
    fn units_are_compiled_in_phases_and_linked_with_the_same_sum_each_time() {
        let image = Image::new("compile");
        let mut marks = Vec::new();
        let sum = run(&config(&image), &mut |mark| marks.push(mark)).unwrap();
        assert_eq!(marks, [16, 17, 18, 35]);
        assert!(sum.is_some());
        assert_eq!(run(&config(&image), &mut |_| {}).unwrap(), sum);
        let mut other = config(&image);
        other.units = 4;
        assert_ne!(run(&other, &mut |_| {}).unwrap(), sum);
    }

    #[test]
    fn an_object_that_changes_before_it_is_linked_is_found() {
        let image = Image::new("object");
        let wrong = run(&config(&image), &mut |mark| {
            if mark == 18 {
                image.damage((2 << 20) + 99);
            }
        });
        assert!(wrong.unwrap_err().contains("from block 512 on"));
    }

    #[test]
    fn a_source_that_is_wrong_is_found() {
        let image = Image::new("source");
        // All of the headers' first bytes.
        (0..64).for_each(|block| image.damage(block * BLOCK as u64));
        let wrong = run(&config(&image), &mut |_| {}).unwrap_err();
        assert!(wrong.contains("differs from the pattern"), "{wrong}");
    }
}
