/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The words that cases are written in.
 *
 * What should come out of a case is not known here: it is in the harness that boots this
 * (`pviommu_lab/spec`).
 */
#ifndef IOMMU_CASES_CASES_H
#define IOMMU_CASES_CASES_H

#include "iommu-cases.h"

#define R	VIRTIO_IOMMU_MAP_F_READ
#define W	VIRTIO_IOMMU_MAP_F_WRITE
#define MMIO	VIRTIO_IOMMU_MAP_F_MMIO
#define BYPASS	VIRTIO_IOMMU_ATTACH_F_BYPASS
#define TAIL	sizeof(struct virtio_iommu_req_tail)
/* An address that is in the input range of any device that serves a PCI function, above RAM. */
#define AT	0x100000000ULL
#define PAGES(n)	((n) * PAGE_SIZE)
/* The last address of that many pages from AT on. */
#define LAST(n)	(AT + PAGES(n) - 1)

static inline u32 first(const struct run *run)
{
	return run->domain;
}

static inline u32 second(const struct run *run)
{
	return run->domain + 1;
}

/* The endpoint is in a domain with one page, number 2 of those that are watched. */
static inline void one_page(struct run *run)
{
	open_domain(run, first(run));
	map(run, first(run), AT, 1, 2, R | W);
}

static inline void reach(struct run *run)
{
	access(run, AT, 1);
}

/* In a domain with the endpoint's ring and nothing else; and what the endpoint reaches then. */
static inline void map_odd(struct run *run, u64 start, u64 end, u64 phys, u32 flags)
{
	open_domain(run, first(run));
	map_range(run, first(run), start, end, phys, flags);
	reach(run);
}

#define CASE(name)		{ #name, name }
#define WITHOUT(name, bit)	{ #name, name, .without = BIT_ULL(bit) }

#endif
