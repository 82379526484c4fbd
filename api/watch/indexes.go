package watch

import (
	"cmp"
	"context"
	"fmt"
	"sync"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// Names of the indexes, with the name of the room, so that another room can index the same kinds.
const (
	ByVolume = "replicas.volume"
	ByDisk   = "replicas.disk"
	ByNode   = "replicas.node"
	ByImage  = "replicas.image"
	ByLayer  = "replicas.layer"  // the topmost layer of an image copy
	BySource = "replicas.source" // of a replica: the UID of its source's snapshot; of a volume: its data source
	ByTarget = "backups.target"  // of a backup
	ByOrigin = "backups.origin"  // of an unfinished copy of a backup

	ByNextImage = "replicas.next-image" // of a standby volume: the hidden image of the backup that it fetches
)

// index is an index of a kind of objects by one value; an object with the value "" is not in the index.
type index struct {
	kind  client.Object
	name  string
	value func(client.Object) string
}

// indexSet is a set of indexes in the cache of a manager.
type indexSet struct {
	manager ctrl.Manager
	name    string
}

var indexed struct {
	sync.Mutex
	sets map[indexSet]bool
}

// AddIndexes adds the indexes to a manager's cache once, whatever roles run on the manager.
func AddIndexes(mgr ctrl.Manager) error {
	return addOnce(indexSet{mgr, "volumes"}, []index{
		{&api.Replica{}, ByVolume, func(o client.Object) string { return o.(*api.Replica).Spec.Volume }},
		{&api.Replica{}, ByDisk, func(o client.Object) string { return string(o.(*api.Replica).Spec.Disk) }},
		{&api.Replica{}, ByNode, func(o client.Object) string { return o.(*api.Replica).Spec.Node }},
		{&api.ImageCopy{}, ByDisk, func(o client.Object) string { return string(o.(*api.ImageCopy).Spec.Disk) }},
		{&api.ImageCopy{}, ByImage, func(o client.Object) string { return o.(*api.ImageCopy).Spec.Image }},
		{&api.ImageCopy{}, ByLayer, func(o client.Object) string { return TopLayer(o.(*api.ImageCopy).Spec.Layers) }},
		{&api.Replica{}, BySource, func(o client.Object) string {
			if from := o.(*api.Replica).Spec.From; from != nil {
				return string(from.Snapshot)
			}
			return ""
		}},
		{&api.Snapshot{}, ByVolume, func(o client.Object) string { return o.(*api.Snapshot).Spec.Volume }},
		{&api.Volume{}, BySource, func(o client.Object) string { return o.(*api.Volume).Spec.DataSource }},
		{&api.Volume{}, ByImage, func(o client.Object) string {
			v := o.(*api.Volume)
			return cmp.Or(v.Spec.BackingImage, v.RestoreImage())
		}},
		{&api.Volume{}, ByNextImage, func(o client.Object) string { return o.(*api.Volume).NextImage() }},
	})
}

// AddBackupIndexes adds the indexes of Backups and BackupBackingImages, ByVolume, ByImage and ByTarget, to a manager's
// cache once. AddIndexes does not add them, because an index fills the cache with the objects, and the data role needs
// no backups.
func AddBackupIndexes(mgr ctrl.Manager) error {
	return addOnce(indexSet{mgr, "backups"}, []index{
		{&api.Backup{}, ByVolume, func(o client.Object) string { return o.(*api.Backup).Spec.Volume }},
		{&api.Backup{}, ByTarget, func(o client.Object) string { return o.(*api.Backup).Target() }},
		{&api.BackupBackingImage{}, ByImage, func(o client.Object) string {
			return o.(*api.BackupBackingImage).Spec.BackingImageName
		}},
		{&api.BackupBackingImage{}, ByTarget, func(o client.Object) string { return o.(*api.BackupBackingImage).Target() }},
	})
}

// AddCopyIndexes adds the index of the unfinished copies of Backups and BackupBackingImages, ByOrigin, to a manager's
// cache once.
func AddCopyIndexes(mgr ctrl.Manager) error {
	origin := func(o client.Object) string {
		if b := o.(api.StoredBackup); !b.Ended() {
			return b.Origin()
		}
		return ""
	}
	return addOnce(indexSet{mgr, "copies"}, []index{
		{&api.Backup{}, ByOrigin, origin},
		{&api.BackupBackingImage{}, ByOrigin, origin},
	})
}

func addOnce(set indexSet, indexes []index) error {
	indexed.Lock()
	defer indexed.Unlock()
	if indexed.sets[set] {
		return nil
	}
	fi := set.manager.GetFieldIndexer()
	for _, ix := range indexes {
		if err := fi.IndexField(context.Background(), ix.kind, ix.name, func(o client.Object) []string {
			if v := ix.value(o); v != "" {
				return []string{v}
			}
			return nil
		}); err != nil {
			return fmt.Errorf("index %s of %T: %w", ix.name, ix.kind, err)
		}
	}
	if indexed.sets == nil {
		indexed.sets = map[indexSet]bool{}
	}
	indexed.sets[set] = true
	return nil
}

// TopLayer returns the UID of the topmost of the layers of an image, or "" without layers.
func TopLayer(layers []api.UID) string {
	if len(layers) == 0 {
		return ""
	}
	return string(layers[len(layers)-1])
}
