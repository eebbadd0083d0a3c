//! The command `dma-rogue`.

use std::time::Duration;

use workload::rogue::edu::Edu;
use workload::rogue::pieces::{self, PiecesConfig};
use workload::rogue::{self, AttemptConfig};

use crate::failure::Failure;
use crate::options::Options;

/// Copies through mappings, tries accesses that no mapping allows, and, on request, makes and ends
/// many mappings.
pub fn run(options: &mut Options) -> Result<(), Failure> {
    let bits = options.number("mask-bits", Some(28))?;
    let bits = u32::try_from(bits)
        .ok()
        .filter(|bits| (26..=64).contains(bits));
    let bits = bits.ok_or_else(|| Failure::Usage("--mask-bits is outside 26 to 64".into()))?;
    let wait = Duration::from_millis(options.number("wait-ms", Some(0))?);
    let attempts = AttemptConfig {
        wait,
        pause: Duration::from_millis(options.number("pause-ms", Some(0))?),
        remap: options.flag("remap"),
    };
    let has_pieces = options.flag("pieces");
    let pieces = PiecesConfig {
        count: options.number("count", Some(64))?,
        seed: options.number("seed", Some(1))?,
        wait,
    };
    let address = options.subject("ADDRESS")?;
    let mut device = Edu::open(&address, bits).map_err(Failure::Run)?;
    rogue::prove(&mut device).map_err(Failure::Run)?;
    println!("dma mapped ok");
    let say = &mut |attempt: &rogue::Attempt| println!("{}", attempt.line());
    let made = rogue::attempt_all(&mut device, &attempts, say).map_err(Failure::Run)?;
    let mut arrived = made.iter().filter(|attempt| !attempt.is_blocked).count() as u64;
    if has_pieces {
        let report = pieces::run(&mut device, &pieces).map_err(Failure::Run)?;
        println!(
            "pieces maps={} unmaps={} cuts={} copies={} rogues={} arrived={}",
            report.maps, report.unmaps, report.cuts, report.copies, report.rogues, report.arrived
        );
        arrived += report.arrived;
    }
    match arrived {
        0 => {
            println!("dma-rogue ok attempts={}", made.len());
            Ok(())
        }
        _ => Err(Failure::Run(format!(
            "{arrived} accesses that no mapping allows have arrived"
        ))),
    }
}
