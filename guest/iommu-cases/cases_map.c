// SPDX-License-Identifier: GPL-2.0
/* Cases of MAP and UNMAP (VIRTIO 1.3, 5.13.6.5 and 5.13.6.6). */
#include "cases.h"

static void map_domain_unknown(struct run *run)
{
	map(run, first(run), AT, 1, 2, R | W);
}

static void map_start_unaligned(struct run *run)
{
	map_odd(run, AT - 0x800, LAST(1), watched(run, 2), R | W);
}

static void map_end_unaligned(struct run *run)
{
	map_odd(run, AT, LAST(1) - 1, watched(run, 2), R | W);
}

static void map_phys_unaligned(struct run *run)
{
	map_odd(run, AT, LAST(1), watched(run, 2) + 0x800, R | W);
}

static void map_flag_unknown(struct run *run)
{
	map_odd(run, AT, LAST(1), watched(run, 2), R | W | 1U << 3);
	map(run, first(run), AT, 1, 2, R | W | 1U << 31);
}

static void map_mmio(struct run *run)
{
	map_odd(run, AT, LAST(1), watched(run, 2), R | W | MMIO);
}

static void map_existing(struct run *run)
{
	one_page(run);
	map(run, first(run), AT, 1, 4, R | W);
	reach(run);
}

static void map_over_part(struct run *run)
{
	one_page(run);
	map(run, first(run), AT - PAGES(1), 3, 8, R | W);
	reach(run);
	access(run, AT + PAGES(1), 1);
}

static void map_in_bypass_domain(struct run *run)
{
	attach(run, first(run), run->endpoint, BYPASS);
	map(run, first(run), AT, 1, 2, R | W);
}

static void map_read_only(struct run *run) { map_odd(run, AT, LAST(1), watched(run, 2), R); }
static void map_write_only(struct run *run) { map_odd(run, AT, LAST(1), watched(run, 2), W); }
static void map_no_access(struct run *run) { map_odd(run, AT, LAST(1), watched(run, 2), 0); }

static void map_above_input_range(struct run *run)
{
	u64 last = run->iommu->input_last;

	if (last == U64_MAX) {
		say(run, " n/a");
		return;
	}
	open_domain(run, first(run));
	map_range(run, first(run), last + 1, last + PAGES(1), watched(run, 2), R | W);
	map_range(run, first(run), last + 1 - PAGES(1), last + PAGES(1), watched(run, 2), R | W);
}

static void map_last_of_input_range(struct run *run)
{
	u64 last = run->iommu->input_last;

	open_domain(run, first(run));
	map_range(run, first(run), last + 1 - PAGES(1), last, watched(run, 2), R | W);
	access(run, last, 1);
}

static void map_everything(struct run *run)
{
	attach(run, first(run), run->endpoint, 0);
	map_range(run, first(run), 0, U64_MAX, 0, R | W);
	map_range(run, first(run), U64_MAX - PAGES(1) + 1, U64_MAX, watched(run, 2), R | W);
}

static void map_reserved_region(struct run *run)
{
	const struct iommu *iommu = run->iommu;

	if (!iommu->has_resv) {
		say(run, " n/a");
		return;
	}
	open_domain(run, first(run));
	map_range(run, first(run), iommu->resv_first, iommu->resv_last, watched(run, 2), R | W);
	map(run, first(run), iommu->resv_first - PAGES(1), 2, 4, R | W);
	map(run, first(run), iommu->resv_first - PAGES(1), 1, 2, R | W);
	access(run, iommu->resv_first - PAGES(1), 1);
}

static void map_no_memory(struct run *run)
{
	/* The platform's choice; and the last addresses that there are, and around them. */
	map_odd(run, AT, LAST(1), 1ULL << 51, R | W);
	map_range(run, first(run), AT + PAGES(2), LAST(4), U64_MAX - PAGES(1) + 1, R | W);
	attach(run, first(run), run->other, 0);
}

/* UNMAP: the examples of the specification by their numbers */

static void unmap_nothing(struct run *run)
{
	attach(run, first(run), run->endpoint, 0);
	unmap(run, first(run), AT, LAST(1));
}

static void unmap_exact(struct run *run)
{
	one_page(run);
	unmap(run, first(run), AT, LAST(1));
	reach(run);
}

/* Two mappings, of pages 2 and 4, and room between them or not. */
static void two_mappings(struct run *run, unsigned int between)
{
	one_page(run);
	map(run, first(run), AT + PAGES(1 + between), 1, 4, R | W);
}

static void unmap_two(struct run *run)
{
	two_mappings(run, 0);
	unmap(run, first(run), AT, LAST(2));
	reach(run);
	access(run, AT + PAGES(1), 1);
}

/* A mapping of two pages, of which these are to be unmapped. */
static void unmap_some(struct run *run, u64 start, u64 end)
{
	open_domain(run, first(run));
	map(run, first(run), AT, 2, 2, R | W);
	unmap(run, first(run), start, end);
	reach(run);
	access(run, LAST(2), 1);
}

static void unmap_front(struct run *run) { unmap_some(run, AT, LAST(1)); }
static void unmap_back(struct run *run) { unmap_some(run, AT + PAGES(1), LAST(2)); }
static void unmap_inside(struct run *run) { unmap_some(run, AT + 0x800, LAST(2) - 0x800); }
static void unmap_over_an_end(struct run *run) { unmap_some(run, AT + PAGES(1), LAST(3)); }
static void unmap_byte(struct run *run) { unmap_some(run, AT, AT); }

static void unmap_first_of_two(struct run *run)
{
	two_mappings(run, 0);
	unmap(run, first(run), AT, LAST(1));
	reach(run);
	access(run, AT + PAGES(1), 1);
}

static void unmap_wider(struct run *run)
{
	one_page(run);
	unmap(run, first(run), AT - PAGES(1), LAST(2));
	reach(run);
}

static void unmap_with_a_gap(struct run *run)
{
	two_mappings(run, 1);
	unmap(run, first(run), AT, LAST(3));
	reach(run);
	access(run, AT + PAGES(2), 1);
}

static void unmap_one_and_a_half(struct run *run)
{
	one_page(run);
	map(run, first(run), AT + PAGES(1), 2, 4, R | W);
	unmap(run, first(run), AT, LAST(2));
	reach(run);
	access(run, LAST(3), 1);
}

static void unmap_everything(struct run *run)
{
	one_page(run);
	unmap(run, first(run), 0, run->iommu->input_last);
	/* The endpoint's ring is not mapped any more either. */
	reach(run);
}

static void unmap_domain_unknown(struct run *run)
{
	unmap(run, first(run), AT, LAST(1));
}

static void unmap_in_bypass_domain(struct run *run)
{
	attach(run, first(run), run->endpoint, BYPASS);
	unmap(run, first(run), AT, LAST(1));
}

static void unmap_reserved(struct run *run)
{
	unsigned int len;

	one_page(run);
	len = make_unmap(run, first(run), AT, LAST(1));
	memset(run->iommu->out + len - 4, 0xff, 4);
	send(run, &(struct cut) { .name = "unmap", .out_len = len, .in_len = TAIL });
}

static void unmap_start_above_end(struct run *run)
{
	one_page(run);
	unmap(run, first(run), LAST(1), AT - 1);
	reach(run);
}

static void unmap_in_another_domain(struct run *run)
{
	one_page(run);
	attach(run, second(run), run->other, 0);
	unmap(run, second(run), AT, LAST(1));
	reach(run);
}

const struct iommu_case mapping_cases[] = {
	CASE(map_domain_unknown), CASE(map_start_unaligned), CASE(map_end_unaligned),
	CASE(map_phys_unaligned), CASE(map_flag_unknown), CASE(map_mmio),
	{ "map_mmio_not_negotiated", map_mmio, .without = BIT_ULL(VIRTIO_IOMMU_F_MMIO) },
	CASE(map_existing), CASE(map_over_part), CASE(map_in_bypass_domain),
	CASE(map_read_only), CASE(map_write_only), CASE(map_no_access),
	CASE(map_above_input_range), CASE(map_last_of_input_range), CASE(map_everything),
	CASE(map_reserved_region), CASE(map_no_memory),
	CASE(unmap_nothing), CASE(unmap_exact), CASE(unmap_two), CASE(unmap_front),
	CASE(unmap_back), CASE(unmap_inside), CASE(unmap_over_an_end), CASE(unmap_byte),
	CASE(unmap_first_of_two), CASE(unmap_wider), CASE(unmap_with_a_gap),
	CASE(unmap_one_and_a_half), CASE(unmap_everything), CASE(unmap_domain_unknown),
	CASE(unmap_in_bypass_domain), CASE(unmap_reserved), CASE(unmap_start_above_end),
	CASE(unmap_in_another_domain),
};
const unsigned int mapping_case_count = ARRAY_SIZE(mapping_cases);

/* A driver must not ask for it. A device that takes it may never come back from the UNMAP. */
static void map_start_above_end(struct run *run)
{
	attach(run, first(run), run->endpoint, 0);
	map_range(run, first(run), AT + PAGES(2), AT - 1, watched(run, 2), R | W);
	unmap(run, first(run), 0, run->iommu->input_last);
}

const struct iommu_case last_case = CASE(map_start_above_end);
