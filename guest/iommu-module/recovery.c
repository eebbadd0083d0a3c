// SPDX-License-Identifier: GPL-2.0
/*
 * Overdue requests and removals that are not confirmed.
 *
 * A device that does not answer within the bound is suspect, not dead. Until any completion
 * arrives, calls that need it fail at once, so the CPU stays usable; a worker looks for
 * completions and repeats the notification. Mappings whose UNMAP is overdue, or could not be
 * sent, are quarantined: their addresses stay allocated until the device confirms the removal.
 */
#include "exitless-iommu.h"

/* How often the worker looks at a suspect device, or repeats failed UNMAPs. */
#define EXI_WATCH_MS 10
/* UNMAPs sent in one go from the list of deferred ones. */
#define EXI_DEFERRED_BATCH 32

static void exi_arm_watch(struct exi_iommu *iommu, unsigned int ms)
{
	if (!READ_ONCE(iommu->closing))
		mod_delayed_work(iommu->wq, &iommu->work, msecs_to_jiffies(ms));
}

/* Called with vq_lock held, as is everything here that does not say otherwise. */
void exi_quarantine(struct exi_iommu *iommu, struct exi_map *map)
{
	if (map->quarantined)
		return;
	map->quarantined = true;
	iommu->st.quarantined++;
	iommu->st.quarantined_total++;
}

/* Keeps mappings until their UNMAP can be sent (again); gives up those that failed too often. */
void exi_defer(struct exi_iommu *iommu, struct list_head *maps)
{
	/* While any are kept the worker comes for them: it is not put off for each. */
	bool is_first = list_empty(&iommu->deferred);
	struct exi_map *map, *next;

	list_for_each_entry_safe(map, next, maps, link) {
		exi_quarantine(iommu, map);
		if (map->tries < EXI_UNMAP_TRIES) {
			list_move_tail(&map->link, &iommu->deferred);
			continue;
		}
		list_move_tail(&map->link, &iommu->lost);
		iommu->st.lost++;
		dev_err_ratelimited(&iommu->vdev->dev,
				    "device refuses to unmap; %u pages stay reserved\n",
				    map->pages);
	}
	if (is_first && !iommu->suspect && !iommu->broken)	/* else the watch is running */
		exi_arm_watch(iommu, EXI_WATCH_MS);
}

/* Sends deferred UNMAPs while the device answers. Called without locks, in process context. */
void exi_send_deferred(struct exi_iommu *iommu)
{
	struct exi_batch batch;
	struct exi_map *map;
	unsigned int n, sent = 0;
	unsigned long flags;
	LIST_HEAD(todo);
	LIST_HEAD(run);

	spin_lock_irqsave(&iommu->vq_lock, flags);
	if (!iommu->suspect && !iommu->broken)
		list_splice_init(&iommu->deferred, &todo);
	spin_unlock_irqrestore(&iommu->vq_lock, flags);
	/* What fails again goes back to the list, not to todo: each is sent once per call. */
	while (!list_empty(&todo)) {
		exi_batch_init(&batch);
		for (n = 0; n < EXI_DEFERRED_BATCH && !list_empty(&todo); n++) {
			map = list_first_entry(&todo, struct exi_map, link);
			list_move(&map->link, &run);
			exi_queue_unmap(map->ep, &run, &batch);
			sent++;
		}
		exi_wait(iommu, &batch);
		cond_resched();
	}
	if (sent)
		dev_dbg(&iommu->vdev->dev, "%u deferred removals sent\n", sent);
}

/*
 * After a DETACH that the device confirmed, the endpoint's domain is gone, and its mappings with
 * it: frees those still waiting for an UNMAP of their own. Called without locks.
 */
void exi_forget_quarantine(struct exi_ep *ep)
{
	struct exi_iommu *iommu = ep->iommu;
	struct list_head *lists[] = { &iommu->deferred, &iommu->lost };
	struct exi_map *map, *next;
	unsigned long flags;
	unsigned int i;

	spin_lock_irqsave(&iommu->vq_lock, flags);
	for (i = 0; i < ARRAY_SIZE(lists); i++) {
		list_for_each_entry_safe(map, next, lists[i], link) {
			if (map->ep != ep)
				continue;
			list_del(&map->link);
			exi_map_free(map);
		}
	}
	spin_unlock_irqrestore(&iommu->vq_lock, flags);
}

void exi_set_suspect(struct exi_iommu *iommu)
{
	if (iommu->suspect || iommu->broken)
		return;
	WRITE_ONCE(iommu->suspect, true);
	dev_err_ratelimited(&iommu->vdev->dev,
			    "device does not answer; mapping fails until it does\n");
	exi_arm_watch(iommu, EXI_WATCH_MS);
}

void exi_clear_suspect(struct exi_iommu *iommu)
{
	WRITE_ONCE(iommu->suspect, false);
	iommu->st.resumed++;
	dev_info_ratelimited(&iommu->vdev->dev, "device answers again\n");
	exi_arm_watch(iommu, 0);	/* sends the deferred UNMAPs */
}

/* Looks for completions on behalf of a call. Returns whether the device is in service again. */
bool exi_reap_suspect(struct exi_iommu *iommu)
{
	exi_reap(iommu);
	return !iommu->suspect && !iommu->broken;
}

/* The worker's part. Returns whether to come back in EXI_WATCH_MS. Called without locks. */
bool exi_watch_suspect(struct exi_iommu *iommu)
{
	unsigned long flags;
	bool suspect, again;

	spin_lock_irqsave(&iommu->vq_lock, flags);
	exi_reap(iommu);
	suspect = iommu->suspect && !iommu->broken;
	spin_unlock_irqrestore(&iommu->vq_lock, flags);
	if (suspect) {
		/* In case the notification was lost. Not counted: it belongs to no request. */
		if (!exi_muted())
			virtqueue_notify(iommu->vqs[0]);
		return true;
	}
	exi_send_deferred(iommu);
	spin_lock_irqsave(&iommu->vq_lock, flags);
	again = iommu->suspect || !list_empty(&iommu->deferred);
	again = again && !iommu->broken;
	spin_unlock_irqrestore(&iommu->vq_lock, flags);
	return again;
}
