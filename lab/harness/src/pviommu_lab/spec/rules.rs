//! Expected results of each case of `guest/iommu-cases`, in the module's order, with the section of
//! VIRTIO 1.3 that requires each, and the strength of the requirement.
//!
//! Expectations are written as [`judge`](super::case_log::judge) reads them. `open=ok`: the
//! endpoint was attached to a new domain, and its ring mapped. `dma=PAGE.OFFSET`: the byte of the
//! watched memory that a write of one byte has reached.

use std::fmt;

use Level::{Free, May, Must, Should, Stated};

/// Strength of the specification's requirement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// «The device MUST».
    Must,
    /// «The device SHOULD».
    Should,
    /// «The device MAY»: one of two ways, and no third.
    May,
    /// In the text outside the requirements.
    Stated,
    /// A driver must not ask for it. The device has to answer and to go on, and nothing else may
    /// change.
    Free,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Must => "MUST",
            Should => "SHOULD",
            May => "MAY",
            Stated => "text",
            Free => "open",
        })
    }
}

/// A case's expectation.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// Name of the case, as in the module.
    pub name: &'static str,
    /// Section of VIRTIO 1.3.
    pub section: &'static str,
    /// Strength of the requirement there.
    pub level: Level,
    /// Steps, and the permitted values of each.
    pub expected: &'static str,
}

const fn rule(
    section: &'static str,
    level: Level,
    name: &'static str,
    expected: &'static str,
) -> Rule {
    Rule {
        name,
        section,
        level,
        expected,
    }
}

const FRAMING: &str = "2.7.4";
const CONFIG: &str = "5.13.4";
const RESET: &str = "5.13.5";
const OPERATIONS: &str = "5.13.6";
const ATTACH: &str = "5.13.6.3";
const DETACH: &str = "5.13.6.4";
const MAP: &str = "5.13.6.5";
const UNMAP: &str = "5.13.6.6";
const PROBE: &str = "5.13.6.7";
const RESV_MEM: &str = "5.13.6.8";
const FAULTS: &str = "5.13.6.9";

/// An UNMAP that would split a mapping of the pages 2 and 3.
const SPLITS: &str = "open=ok map=OK unmap=RANGE dma=2.000 dma=3.fff";
/// Bytes at both ends of page 8, beside one neighbour, and between two.
const BESIDE_ONE: &str = "open=ok map=OK map=OK dma=8.000 dma=8.fff";
const BESIDE_TWO: &str = "open=ok map=OK map=OK map=OK dma=8.000 dma=8.fff";

/// All rules, in the module's order.
pub const RULES: &[Rule] = &[
    // Requests that cannot be parsed.
    rule(OPERATIONS, Stated, "tail_absent", "attach=-"),
    rule(OPERATIONS, Stated, "tail_of_three_bytes", "attach=-"),
    rule(FRAMING, Must, "tail_in_two_pieces", "attach=OK"),
    rule(FRAMING, Must, "tail_bytewise", "attach=OK"),
    rule(FRAMING, Must, "request_in_pieces", "attach=OK"),
    rule(OPERATIONS, Stated, "head_absent", "attach=-|INVAL"),
    rule(OPERATIONS, Stated, "head_of_three_bytes", "attach=-|INVAL"),
    rule(OPERATIONS, Stated, "attach_too_short", "attach=-|INVAL"),
    rule(
        OPERATIONS,
        Stated,
        "after_a_bad_one",
        "attach=-|INVAL attach=OK",
    ),
    rule(
        OPERATIONS,
        Stated,
        "map_too_short",
        "open=ok map=-|INVAL dma=none",
    ),
    rule(
        OPERATIONS,
        Stated,
        "unmap_too_short",
        "open=ok map=OK unmap=-|INVAL dma=2.000",
    ),
    rule(
        OPERATIONS,
        Should,
        "tail_reserved",
        "attach=OK reserved=000000",
    ),
    rule(OPERATIONS, Should, "type_zero", "request=-"),
    rule(OPERATIONS, Should, "type_six", "request=-"),
    rule(OPERATIONS, Should, "type_255", "request=-"),
    rule(OPERATIONS, Must, "head_reserved", "attach=OK"),
    // ATTACH.
    rule(
        ATTACH,
        Must,
        "attach_endpoint_unknown",
        "attach=NOENT attach=NOENT",
    ),
    rule(ATTACH, Must, "attach_reserved", "attach=INVAL map=NOENT"),
    rule(
        ATTACH,
        Must,
        "attach_flag_unknown",
        "attach=INVAL attach=INVAL",
    ),
    rule(
        ATTACH,
        Stated,
        "attach_bypass_not_negotiated",
        "attach=INVAL",
    ),
    rule(
        ATTACH,
        Stated,
        "attach_again",
        "open=ok map=OK attach=OK dma=2.000",
    ),
    rule(
        ATTACH,
        Should,
        "attach_elsewhere",
        "open=ok map=OK open=ok dma=none map=NOENT",
    ),
    rule(
        ATTACH,
        Should,
        "attach_elsewhere_with_company",
        "open=ok map=OK attach=OK open=ok map=OK dma=4.000 attach=OK dma=2.000",
    ),
    rule(
        ATTACH,
        May,
        "attach_shared",
        "open=ok map=OK attach=OK|UNSUPP detach=any dma=2.000",
    ),
    rule(
        ATTACH,
        Should,
        "attach_bypass_to_plain",
        "open=ok map=OK attach=INVAL dma=2.000",
    ),
    rule(
        ATTACH,
        Should,
        "attach_bypass_to_own_plain",
        "open=ok map=OK attach=INVAL dma=2.000",
    ),
    rule(
        ATTACH,
        Should,
        "attach_plain_to_bypass",
        "attach=OK attach=INVAL",
    ),
    rule(ATTACH, Stated, "attach_bypass", "attach=OK dma=2.fff"),
    rule(ATTACH, Stated, "attach_last_domain", "attach=OK detach=OK"),
    rule(ATTACH, Free, "attach_domain_above_range", "attach=refused"),
    // DETACH.
    rule(
        DETACH,
        Must,
        "detach_ends_access",
        "open=ok map=OK dma=2.000 detach=OK dma=none",
    ),
    rule(
        DETACH,
        Must,
        "detach_endpoint_unknown",
        "attach=OK detach=NOENT",
    ),
    rule(DETACH, May, "detach_not_attached", "detach=refused"),
    rule(
        DETACH,
        May,
        "detach_from_another",
        "open=ok map=OK attach=OK detach=refused dma=2.000",
    ),
    rule(DETACH, Must, "detach_reserved", "attach=OK detach=OK"),
    rule(
        DETACH,
        Stated,
        "domain_made_anew",
        "open=ok map=OK detach=OK open=ok dma=none map=OK dma=4.000",
    ),
    // PROBE.
    rule(PROBE, Stated, "probe_endpoint", "probe=OK"),
    rule(PROBE, Should, "probe_rest", "probe=OK rest=zero"),
    rule(PROBE, Should, "probe_endpoint_unknown", "probe=NOENT"),
    rule(PROBE, Should, "probe_list_too_short", "probe=-|INVAL"),
    rule(PROBE, Should, "probe_no_list", "probe=-|INVAL"),
    rule(OPERATIONS, Stated, "probe_too_short", "probe=-|INVAL"),
    rule(PROBE, Must, "probe_reserved", "probe=OK"),
    // MAP.
    rule(MAP, Should, "map_domain_unknown", "map=NOENT"),
    rule(
        MAP,
        Should,
        "map_start_unaligned",
        "open=ok map=RANGE dma=none",
    ),
    rule(
        MAP,
        Should,
        "map_end_unaligned",
        "open=ok map=RANGE dma=none",
    ),
    rule(
        MAP,
        Should,
        "map_phys_unaligned",
        "open=ok map=RANGE dma=none",
    ),
    rule(
        MAP,
        Must,
        "map_flag_unknown",
        "open=ok map=INVAL dma=none map=INVAL",
    ),
    rule(MAP, Stated, "map_mmio", "open=ok map=OK dma=2.000"),
    rule(
        MAP,
        Stated,
        "map_mmio_not_negotiated",
        "open=ok map=INVAL dma=none",
    ),
    rule(
        MAP,
        Should,
        "map_existing",
        "open=ok map=OK map=INVAL dma=2.000",
    ),
    rule(
        MAP,
        Should,
        "map_over_part",
        "open=ok map=OK map=INVAL dma=2.000 dma=none",
    ),
    rule(MAP, Should, "map_in_bypass_domain", "attach=OK map=INVAL"),
    rule(MAP, Must, "map_read_only", "open=ok map=OK dma=none"),
    rule(MAP, Stated, "map_write_only", "open=ok map=OK dma=2.000"),
    rule(MAP, Must, "map_no_access", "open=ok map=OK|INVAL dma=none"),
    rule(
        OPERATIONS,
        Stated,
        "map_above_input_range",
        "open=ok map=refused map=refused",
    ),
    rule(
        OPERATIONS,
        Stated,
        "map_last_of_input_range",
        "open=ok map=OK dma=2.fff",
    ),
    rule(
        OPERATIONS,
        Stated,
        "map_everything",
        "attach=OK map=refused map=refused",
    ),
    rule(
        RESV_MEM,
        Should,
        "map_reserved_region",
        "open=ok map=refused map=refused map=OK dma=2.000",
    ),
    rule(
        MAP,
        Free,
        "map_no_memory",
        "open=ok map=any dma=none map=any attach=OK",
    ),
    // UNMAP.
    rule(UNMAP, Stated, "unmap_nothing", "attach=OK unmap=OK"),
    rule(
        UNMAP,
        Stated,
        "unmap_exact",
        "open=ok map=OK unmap=OK dma=none",
    ),
    rule(
        UNMAP,
        Stated,
        "unmap_two",
        "open=ok map=OK map=OK unmap=OK dma=none dma=none",
    ),
    rule(UNMAP, Should, "unmap_front", SPLITS),
    rule(UNMAP, Should, "unmap_back", SPLITS),
    rule(UNMAP, Should, "unmap_inside", SPLITS),
    rule(UNMAP, Should, "unmap_over_an_end", SPLITS),
    rule(UNMAP, Should, "unmap_byte", SPLITS),
    rule(
        UNMAP,
        Stated,
        "unmap_first_of_two",
        "open=ok map=OK map=OK unmap=OK dma=none dma=4.000",
    ),
    rule(
        UNMAP,
        Should,
        "unmap_wider",
        "open=ok map=OK unmap=OK dma=none",
    ),
    rule(
        UNMAP,
        Should,
        "unmap_with_a_gap",
        "open=ok map=OK map=OK unmap=OK dma=none dma=none",
    ),
    rule(
        UNMAP,
        Should,
        "unmap_one_and_a_half",
        "open=ok map=OK map=OK unmap=RANGE dma=2.000 dma=5.fff",
    ),
    rule(
        UNMAP,
        Should,
        "unmap_everything",
        "open=ok map=OK unmap=OK dma=none",
    ),
    rule(UNMAP, Should, "unmap_domain_unknown", "unmap=NOENT"),
    rule(
        UNMAP,
        Should,
        "unmap_in_bypass_domain",
        "attach=OK unmap=INVAL",
    ),
    rule(
        UNMAP,
        May,
        "unmap_reserved",
        "open=ok map=OK unmap=OK|INVAL",
    ),
    rule(
        UNMAP,
        Free,
        "unmap_start_above_end",
        "open=ok map=OK unmap=any dma=2.000",
    ),
    rule(
        UNMAP,
        Stated,
        "unmap_in_another_domain",
        "open=ok map=OK attach=OK unmap=OK dma=2.000",
    ),
    // Accesses: PA = VA - virt_start + phys_start.
    rule(
        MAP,
        Stated,
        "bytes_alone",
        "open=ok map=OK dma=8.000 dma=8.fff dma=none dma=none",
    ),
    rule(MAP, Stated, "bytes_behind_mapped_later", BESIDE_ONE),
    rule(MAP, Stated, "bytes_behind_mapped_earlier", BESIDE_ONE),
    rule(MAP, Stated, "bytes_before_mapped_later", BESIDE_ONE),
    rule(MAP, Stated, "bytes_before_mapped_earlier", BESIDE_ONE),
    rule(MAP, Stated, "bytes_between_ascending", BESIDE_TWO),
    rule(MAP, Stated, "bytes_between_descending", BESIDE_TWO),
    rule(MAP, Stated, "bytes_under_a_third", BESIDE_TWO),
    rule(
        MAP,
        Stated,
        "bytes_of_a_hole",
        "open=ok map=OK map=OK dma=none dma=none",
    ),
    rule(
        MAP,
        Stated,
        "byte_before_a_mapping",
        "open=ok map=OK dma=none",
    ),
    rule(
        MAP,
        Stated,
        "byte_behind_a_mapping",
        "open=ok map=OK dma=none",
    ),
    rule(
        MAP,
        Stated,
        "byte_before_a_reused_page",
        "open=ok map=OK map=OK dma=8.000 dma=8.fff unmap=OK dma=none",
    ),
    rule(
        MAP,
        Stated,
        "bytes_of_a_long_mapping",
        "open=ok map=OK dma=8.000 dma=8.fff dma=9.000 dma=10.fff dma=none",
    ),
    rule(
        MAP,
        Stated,
        "across_two_mappings",
        "open=ok map=OK map=OK dma=2.000,8.fff",
    ),
    rule(
        MAP,
        Stated,
        "across_an_end",
        "open=ok map=OK dma=none|8.fff",
    ),
    rule(
        MAP,
        Must,
        "across_into_read_only",
        "open=ok map=OK map=OK dma=none|8.fff",
    ),
    // Reports of refused accesses.
    rule(
        FAULTS,
        Stated,
        "fault_not_mapped",
        "open=ok dma=none fault=2@100000123",
    ),
    rule(
        FAULTS,
        Stated,
        "fault_read_only",
        "open=ok map=OK dma=none fault=2@100000123",
    ),
    rule(FAULTS, Stated, "fault_not_attached", "dma=none fault=1"),
    rule(
        FAULTS,
        Stated,
        "fault_buffers_too_short",
        "open=ok dma=none dma=none dma=none dma=none map=OK dma=8.000",
    ),
    // The field `bypass`, and resets.
    rule(OPERATIONS, Should, "bypass_off", "dma=none"),
    rule(OPERATIONS, Stated, "bypass_on", "dma=8.000 dma=none"),
    rule(
        OPERATIONS,
        Stated,
        "bypass_on_while_attached",
        "open=ok dma=none map=OK dma=8.000",
    ),
    rule(CONFIG, Must, "bypass_of_two", "bypass=0|1"),
    rule(CONFIG, Should, "bypass_after_reset", "bypass=1 bypass=0"),
    rule(
        RESET,
        Stated,
        "reset_detaches",
        "open=ok map=OK dma=8.000 dma=none map=NOENT",
    ),
    // Last, since a device may hang in it.
    rule(
        MAP,
        Free,
        "map_start_above_end",
        "attach=OK map=refused unmap=any",
    ),
];

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::fs;

    use super::*;

    #[test]
    fn each_case_of_the_module_has_one_rule() {
        let names: HashSet<&str> = RULES.iter().map(|rule| rule.name).collect();
        assert_eq!(names.len(), RULES.len(), "one name twice");
        let dir = lab::guest_module::iommu_cases();
        let mut listed = HashSet::new();
        for file in ["cases.c", "cases_map.c", "cases_access.c"] {
            let text = fs::read_to_string(dir.join(file)).unwrap();
            for (start, end) in [("CASE(", ')'), ("WITHOUT(", ','), ("{ \"", '"')] {
                let found = text.split(start).skip(1);
                listed.extend(found.filter_map(|rest| Some(rest.split_once(end)?.0.to_owned())));
            }
        }
        let listed: HashSet<&str> = listed.iter().map(String::as_str).collect();
        assert_eq!(listed, names);
    }
}
