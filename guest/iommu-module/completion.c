// SPDX-License-Identifier: GPL-2.0
/*
 * Completions: what the device returned, and what follows for the mappings of the request. All of
 * it runs with vq_lock held, on whichever CPU looked at the used ring, for every waiter.
 */
#include <linux/slab.h>

#include "exitless-iommu.h"

void exi_slot_put(struct exi_iommu *iommu, struct exi_slot *slot)
{
	slot->busy = slot->late = slot->async = false;
	slot->batch = NULL;
	slot->map = NULL;
	slot->probe = NULL;
	INIT_LIST_HEAD(&slot->maps);
	iommu->free_slots[iommu->nfree++] = slot - iommu->slots;
}

/* Result of a request that the device returned after writing len bytes. */
static int slot_result(struct exi_iommu *iommu, const struct exi_slot *slot, unsigned int len)
{
	const struct virtio_iommu_req_tail *tail = (const void *)(slot->buf + slot->out);
	unsigned int need = sizeof(*tail);
	u8 status;

	if (slot->type == VIRTIO_IOMMU_T_PROBE) {
		need = slot->probe_in;
		tail = slot->probe + slot->out + need - sizeof(*tail);
	}
	status = READ_ONCE(tail->status);
	if (len >= need && status == VIRTIO_IOMMU_S_OK)
		return 0;
	iommu->st.errors++;
	dev_warn_ratelimited(&iommu->vdev->dev, "request type %u failed: status %u, %u bytes\n",
			     slot->type, status, len);
	/* 5.13.6: a buffer returned unwritten is a failure; so is one written in part. */
	return len < need ? -EPROTO : -EIO;
}

/* Handles one completion. Called with vq_lock held. */
static void exi_complete(struct exi_iommu *iommu, struct exi_slot *slot, unsigned int len)
{
	int err = slot_result(iommu, slot, len);
	struct exi_batch *batch = slot->batch;
	struct exi_map *map, *next;
	LIST_HEAD(late_map);
	bool refused;

	if (slot->late)
		iommu->st.late++;
	if (slot->async)
		iommu->async_out--;
	switch (slot->type) {
	case VIRTIO_IOMMU_T_MAP:
		map = slot->map;
		/* Without a status it may be mapped or not; an UNMAP is right for both. */
		refused = err && err != -EPROTO;
		if (batch) {
			map->state = refused ? EXI_MAP_FAILED : EXI_MAP_MAPPED;
		} else if (refused) {
			exi_map_free(map);
		} else {		/* mapped after its user gave up: remove it again */
			list_add(&map->link, &late_map);
			exi_defer(iommu, &late_map);
		}
		break;
	case VIRTIO_IOMMU_T_UNMAP:
		list_for_each_entry_safe(map, next, &slot->maps, link) {
			if (err) {
				map->tries++;
				continue;
			}
			map->ep->st.removed++;
			exi_map_free(map);
		}
		if (err)
			exi_defer(iommu, &slot->maps);
		break;
	case VIRTIO_IOMMU_T_PROBE:
		if (!batch)
			kfree(slot->probe);
		break;
	}
	exi_slot_put(iommu, slot);
	if (batch) {
		if (err)
			batch->err = err;
		/* The waiter may return and its stack vanish as soon as it reads 0. */
		smp_store_release(&batch->pending, batch->pending - 1);
	}
	if (iommu->suspect)
		exi_clear_suspect(iommu);
}

/* Reaps all completions; bounded by the slots outstanding. Called with vq_lock held. */
void exi_reap(struct exi_iommu *iommu)
{
	struct exi_slot *slot;
	unsigned int len;

	while ((slot = virtqueue_get_buf(iommu->vqs[0], &len)))
		exi_complete(iommu, slot, len);
	if (unlikely(virtqueue_is_broken(iommu->vqs[0])) && !iommu->broken) {
		/* The ring code found an entry that was never made available. */
		WRITE_ONCE(iommu->broken, true);
		dev_err(&iommu->vdev->dev,
			"request queue is corrupt; no mapping is made until reload\n");
	}
}
