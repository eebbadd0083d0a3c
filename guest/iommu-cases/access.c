// SPDX-License-Identifier: GPL-2.0
/*
 * Accesses to memory by an entropy device (VIRTIO 1.3, 5.4) behind the IOMMU: it writes as many
 * bytes as its buffer has, one if it has to be one. It is reset for each access, so one that a
 * former access has broken serves as well.
 */
#include <linux/gfp.h>
#include <linux/mm.h>
#include <linux/virtio_config.h>

#include "iommu-cases.h"

/* Seconds that a device has for an access; one whose ring cannot be reached may say nothing. */
#define ACCESS_SECONDS	3
/* Bytes that changed are told up to so many. */
#define TOLD		4

#define FEATURES	(BIT_ULL(VIRTIO_F_VERSION_1) | BIT_ULL(VIRTIO_F_ACCESS_PLATFORM))

/*
 * A random byte may be what the memory has already. It is not so under each of these: one in 2^32
 * accesses is overlooked.
 */
static const u8 fills[] = { 0xa5, 0x5a, 0x3c, 0xc3 };

int accessor_open(struct accessor *accessor, struct pci_dev *pdev)
{
	int ret = function_open(&accessor->fn, pdev);

	if (ret)
		return ret;
	accessor->pages = alloc_pages(GFP_KERNEL, WATCHED_ORDER);
	if (!accessor->pages || queue_alloc(&accessor->queue, &accessor->fn, 0)) {
		accessor_close(accessor);
		return -ENOMEM;
	}
	accessor->memory = page_address(accessor->pages);
	if ((function_features(&accessor->fn) & FEATURES) != FEATURES) {
		pci_err(pdev, "the entropy device is not behind the IOMMU: no ACCESS_PLATFORM\n");
		accessor_close(accessor);
		return -ENODEV;
	}
	return 0;
}

void accessor_close(struct accessor *accessor)
{
	queue_free(&accessor->queue);
	if (accessor->pages)
		__free_pages(accessor->pages, WATCHED_ORDER);
	accessor->pages = NULL;
	function_close(&accessor->fn);
}

/* Guest-physical address of a page of the memory that is watched. */
u64 watched(const struct run *run, unsigned int page)
{
	return page_to_phys(run->accessor->pages + page);
}

/* Attaches the endpoint and maps its ring, to itself. Says `open=ok`, or that it failed. */
void open_domain(struct run *run, u32 domain)
{
	u64 ring = virt_to_phys(run->accessor->queue.page);
	const u32 flags = VIRTIO_IOMMU_MAP_F_READ | VIRTIO_IOMMU_MAP_F_WRITE;

	if (run->is_over)
		return;
	if (succeeds(run, make_attach(run, domain, run->endpoint, 0)) &&
	    succeeds(run, make_map(run, domain, ring, ring + PAGE_SIZE - 1, ring, flags)))
		say(run, " open=ok");
	else
		say(run, " open=failed");
}

/* Maps pages that are watched. */
void map(struct run *run, u32 domain, u64 iova, unsigned int pages, unsigned int page, u32 flags)
{
	u64 last = iova + pages * PAGE_SIZE - 1;

	map_range(run, domain, iova, last, watched(run, page), flags);
}

/* Bytes of the watched memory that were seen to change, in its order. */
struct changes {
	unsigned int at[TOLD], count;
	bool has_more;
};

static void note(struct changes *changes, const u8 *memory, u8 fill)
{
	unsigned int at, i, place;

	for (at = 0; at < WATCHED * PAGE_SIZE; at++) {
		if (memory[at] == fill)
			continue;
		for (place = 0; place < changes->count && changes->at[place] < at; place++)
			;
		if (place < changes->count && changes->at[place] == at)
			continue;
		if (changes->count == TOLD) {
			changes->has_more = true;
			return;
		}
		for (i = changes->count++; i > place; i--)
			changes->at[i] = changes->at[i - 1];
		changes->at[place] = at;
	}
}

/*
 * One access. What the device says of it is not asked: what counts is what it has written.
 * Positive if it said nothing.
 */
static int once(struct accessor *accessor, u64 iova, unsigned int len)
{
	const struct segment segment = { .at = iova, .len = len, .is_written = true };
	struct function *fn = &accessor->fn;
	enum answer answer;
	u32 written;
	u16 id;
	int ret = function_reset(fn);

	ret = ret ?: function_negotiate(fn, FEATURES);
	ret = ret ?: queue_start(&accessor->queue);
	if (ret)
		return ret;
	function_go(fn);
	queue_post(&accessor->queue, 0, &segment, 1);
	queue_kick(&accessor->queue);
	answer = queue_wait(&accessor->queue, ACCESS_SECONDS, &id, &written);
	/* From here on it writes nothing. */
	return function_reset(fn) ?: answer == SILENT;
}

/*
 * Has the device write `len` bytes at an I/O virtual address. Says which bytes of the watched
 * memory changed, PAGE.OFFSET each, or `none`.
 */
void access(struct run *run, u64 iova, unsigned int len)
{
	struct accessor *accessor = run->accessor;
	struct changes changes = { };
	unsigned int i, silent = 0;

	if (run->is_over)
		return;
	/* One that is silent twice cannot reach its ring. */
	for (i = 0; i < ARRAY_SIZE(fills) && silent < 2; i++) {
		int ret;

		memset(accessor->memory, fills[i], WATCHED * PAGE_SIZE);
		ret = once(accessor, iova, len);
		silent += ret > 0;
		if (ret < 0) {
			say(run, " dma=stuck");
			run->is_over = true;
			return;
		}
		note(&changes, accessor->memory, fills[i]);
	}
	say(run, " dma=%s", changes.count ? "" : "none");
	for (i = 0; i < changes.count; i++)
		say(run, "%s%lu.%03lx", i ? "," : "", changes.at[i] / PAGE_SIZE,
		    changes.at[i] % PAGE_SIZE);
	if (changes.has_more)
		say(run, ",more");
}
