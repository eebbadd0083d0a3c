// SPDX-License-Identifier: GPL-2.0
/*
 * Functions that had a driver before this module came, and the files of the driver's directory
 * /sys/bus/virtio/drivers/exitless-iommu:
 *
 *   endpoints	(read) one line for each function that VIOT names
 *   rebind	(write a PCI address) unbinds its driver and binds it again, now translated
 *   release	(write a PCI address, or "all") unbinds drivers, so that the module can be unloaded;
 *		they are bound again after that, with direct DMA
 *
 * Both writes take the device away from whoever uses it: a mounted disk loses its file system.
 */
#include <linux/module.h>

#include "exitless-iommu.h"

/* Calls fn for every function that VIOT names. Called with exi_control_lock held. */
static int each_endpoint(struct exi_iommu *iommu, const char *name,
			 int (*fn)(struct exi_iommu *iommu, struct pci_dev *pdev, void *arg),
			 void *arg)
{
	struct pci_dev *pdev = NULL;
	int ret = 0, found = 0;
	u32 id;

	for_each_pci_dev(pdev) {
		if (!exi_viot_endpoint(iommu, pdev, &id))
			continue;
		if (name && strcmp(name, pci_name(pdev)))
			continue;
		found++;
		ret = fn(iommu, pdev, arg);
		if (ret) {
			pci_dev_put(pdev);
			break;
		}
	}
	return ret ?: found;
}

/* Returns whether a driver is bound to a function, and through us. */
static bool is_bound(struct exi_iommu *iommu, struct pci_dev *pdev, bool *ours)
{
	struct exi_ep *ep;
	bool bound;

	mutex_lock(&iommu->mutex);
	*ours = false;
	list_for_each_entry(ep, &iommu->eps, link)
		if (ep->dev == &pdev->dev && ep->bound)
			*ours = true;
	bound = READ_ONCE(pdev->dev.driver);
	mutex_unlock(&iommu->mutex);
	return bound;
}

static int rebind_one(struct exi_iommu *iommu, struct pci_dev *pdev, void *arg)
{
	int ret;

	device_release_driver(&pdev->dev);
	ret = device_attach(&pdev->dev);
	if (ret < 0)
		return ret;
	if (!ret)
		pci_info(pdev, "no driver bound again\n");
	return 0;
}

static int release_one(struct exi_iommu *iommu, struct pci_dev *pdev, void *arg)
{
	struct exi_ep *ep;
	bool ours;

	if (!is_bound(iommu, pdev, &ours) || !ours)
		return 0;
	mutex_lock(&iommu->mutex);
	list_for_each_entry(ep, &iommu->eps, link)
		if (ep->dev == &pdev->dev)
			ep->reattach = true;
	mutex_unlock(&iommu->mutex);
	device_release_driver(&pdev->dev);
	return 0;
}

static int child_in_use(struct device *child, void *arg)
{
	return child->bus && !strcmp(child->bus->name, "virtio") && child->driver;
}

/*
 * Where virtio_pci is a module, loading it binds it to every virtio function at once, before this
 * module can come. As long as the virtio device has no driver, nobody uses the function.
 */
static bool is_idle_virtio(struct pci_dev *pdev)
{
	struct device_driver *driver;
	bool idle;

	device_lock(&pdev->dev);
	driver = pdev->dev.driver;
	idle = driver && !strcmp(driver->name, "virtio-pci") &&
	       !device_for_each_child(&pdev->dev, NULL, child_in_use);
	device_unlock(&pdev->dev);
	return idle;
}

static int take_one(struct exi_iommu *iommu, struct pci_dev *pdev, void *arg)
{
	const bool *rebind = arg;
	bool ours;

	if (!is_bound(iommu, pdev, &ours) || ours)
		return 0;
	if (*rebind || is_idle_virtio(pdev)) {
		pci_info(pdev, "has a driver: binding it again, translated\n");
		rebind_one(iommu, pdev, NULL);
		return 0;
	}
	pci_warn(pdev, "has a driver and is NOT translated; to take it (its users lose it):\n");
	pci_warn(pdev, "  echo %s > /sys/bus/virtio/drivers/exitless-iommu/rebind\n",
		 pci_name(pdev));
	return 0;
}

/* At load: functions in use are listed, or with rebind=1 taken; those nobody uses are taken. */
void exi_take_bound(struct exi_iommu *iommu, bool rebind)
{
	each_endpoint(iommu, NULL, take_one, &rebind);
}

/* Applies fn to the function named in a sysfs write; name NULL: to all. */
static ssize_t apply(const char *name,
		     int (*fn)(struct exi_iommu *iommu, struct pci_dev *pdev, void *arg))
{
	struct exi_iommu *iommu;
	int ret = 0, found = 0;

	mutex_lock(&exi_control_lock);
	list_for_each_entry(iommu, &exi_instances, instance) {
		ret = each_endpoint(iommu, name, fn, NULL);
		if (ret < 0)
			break;
		found += ret;
	}
	mutex_unlock(&exi_control_lock);
	if (ret < 0)
		return ret;
	return found || !name ? 0 : -ENODEV;
}

static int copy_name(char *name, size_t size, const char *buf)
{
	if (strscpy(name, buf, size) < 0)
		return -EINVAL;
	strreplace(name, '\n', '\0');
	return 0;
}

static ssize_t rebind_store(struct device_driver *drv, const char *buf, size_t count)
{
	char name[32];
	ssize_t ret = copy_name(name, sizeof(name), buf) ?: apply(name, rebind_one);

	return ret ?: count;
}
static DRIVER_ATTR_WO(rebind);

static ssize_t release_store(struct device_driver *drv, const char *buf, size_t count)
{
	char name[32];
	ssize_t ret = copy_name(name, sizeof(name), buf);

	if (!ret)
		ret = apply(strcmp(name, "all") ? name : NULL, release_one);
	return ret ?: count;
}
static DRIVER_ATTR_WO(release);

struct listing {
	char *buf;
	int at;
};

static int list_one(struct exi_iommu *iommu, struct pci_dev *pdev, void *arg)
{
	struct listing *listing = arg;
	const char *state = "untranslated";
	struct exi_ep *ep;
	u32 id = 0;
	bool bound;

	mutex_lock(&iommu->mutex);
	exi_viot_endpoint(iommu, pdev, &id);
	bound = READ_ONCE(pdev->dev.driver);
	if (pdev->dev.dma_ops == &exi_refuse_ops)
		state = "refused";
	list_for_each_entry(ep, &iommu->eps, link)
		if (ep->dev == &pdev->dev && !ep->removed && (ep->bound || !bound))
			state = ep->attached ? "attached" : "refused";
	mutex_unlock(&iommu->mutex);
	listing->at += sysfs_emit_at(listing->buf, listing->at, "%s endpoint %u %s %s\n",
				     pci_name(pdev), id, state, bound ? "bound" : "unbound");
	return 0;
}

static ssize_t endpoints_show(struct device_driver *drv, char *buf)
{
	struct listing listing = { .buf = buf };
	struct exi_iommu *iommu;

	mutex_lock(&exi_control_lock);
	list_for_each_entry(iommu, &exi_instances, instance)
		each_endpoint(iommu, NULL, list_one, &listing);
	mutex_unlock(&exi_control_lock);
	return listing.at;
}
static DRIVER_ATTR_RO(endpoints);

static struct attribute *exi_driver_attrs[] = {
	&driver_attr_rebind.attr,
	&driver_attr_release.attr,
	&driver_attr_endpoints.attr,
	NULL,
};

static const struct attribute_group exi_driver_group = {
	.attrs = exi_driver_attrs,
};

const struct attribute_group *exi_driver_groups[] = {
	&exi_driver_group,
	NULL,
};
