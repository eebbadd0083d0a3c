//! Coverage counters of a world: a run in which an event never happened shows nothing about it.

/// Number of occurrences of each event.
#[derive(Clone, Copy, Debug, Default)]
pub(in super::super) struct EventCounts {
    pub(in super::super) direct: u64,
    pub(in super::super) direct_completions: u64,
    pub(in super::super) reflected: u64,
    pub(in super::super) injected: u64,
    pub(in super::super) nested: u64,
    pub(in super::super) nested_virtual_on_real: u64,
    pub(in super::super) external: u64,
    pub(in super::super) level: u64,
    pub(in super::super) sent_again: u64,
    pub(in super::super) late_eois: u64,
    pub(in super::super) software: u64,
    pub(in super::super) software_faults: u64,
    pub(in super::super) own_gates: u64,
    pub(in super::super) aliased: u64,
    pub(in super::super) aliased_taken: u64,
    pub(in super::super) sent_virtually: u64,
    pub(in super::super) cut_off: u64,
    pub(in super::super) windows_of_several: u64,
    pub(in super::super) hosts: u64,
    pub(in super::super) stepped: u64,
    pub(in super::super) masked_catches: u64,
    pub(in super::super) fallen: u64,
    pub(in super::super) reads: u64,
    pub(in super::super) back_to_direct: u64,
}

impl EventCounts {
    pub(in super::super) fn all(&self) -> [(&'static str, u64); 24] {
        [
            ("direct deliveries", self.direct),
            ("direct completions", self.direct_completions),
            ("reflected", self.reflected),
            ("injected", self.injected),
            ("nested", self.nested),
            (
                "a virtual one within a real one",
                self.nested_virtual_on_real,
            ),
            ("of 8259s", self.external),
            ("level-triggered", self.level),
            ("lines up after their EOI", self.sent_again),
            ("EOIs that waited for a higher one", self.late_eois),
            ("INT instructions", self.software),
            ("faults of INT instructions", self.software_faults),
            ("own gates", self.own_gates),
            ("aliased", self.aliased),
            ("taken by an alias", self.aliased_taken),
            ("sent to itself virtually", self.sent_virtually),
            ("cut off", self.cut_off),
            ("windows of several", self.windows_of_several),
            ("the host's", self.hosts),
            ("stepped", self.stepped),
            ("caught while masked", self.masked_catches),
            ("fallen back", self.fallen),
            ("reads", self.reads),
            ("back to direct mode", self.back_to_direct),
        ]
    }
}
