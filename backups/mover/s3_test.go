package mover

import (
	"testing"

	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/target/s3"
	"drover.io/drover/backups/target/targettest"
	"drover.io/drover/backups/target/web"
	"drover.io/drover/block/suite"
)

// TestResticRestoresOurBackupsFromAnS3Server: backups, a deletion and a sweep in a bucket of a real server leave a
// repository without errors, from which Drover and restic restore the same bytes.
func TestResticRestoresOurBackupsFromAnS3Server(t *testing.T) {
	suite.Long(t) // builds the server
	v := targettest.StartVersity(t)
	t.Setenv("AWS_ACCESS_KEY_ID", v.AccessKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", v.SecretKey)
	t.Setenv("AWS_DEFAULT_REGION", v.Region)
	store, err := s3.New(s3.Config{Endpoint: v.Endpoint, Region: v.Region, Bucket: v.Bucket, Prefix: "drover",
		AccessKey: web.Secret(v.AccessKey), SecretKey: web.Secret(v.SecretKey)})
	must(t, err)
	t.Cleanup(func() { must(t, store.Close()) })
	must(t, repo.Init(t.Context(), store, password, repo.Options{}))
	w := &world{TB: t, location: "s3:" + v.Endpoint + "/" + v.Bucket + "/drover",
		store: &hookedStore{Store: store, counts: map[string]int{}}}
	w.open()

	disk := newDisk(70 * chunkSize)
	disk.fill(1, 0, 1, 2, 3, 63, 64, 69)
	first := w.backup(disk, options("v"))
	next := disk.copy(disk.size)
	next.fill(2, 1, 2, 3, 63)
	o := options("v")
	o.Base, o.Changed = &first.Snapshot, []int64{1, 2, 3, 63}
	second := w.backup(next, o)
	w.check()
	before := len(w.packs())
	must(t, w.r.DeleteSnapshots(t.Context(), first.Snapshot))
	_, err = w.r.Sweep(t.Context(), repo.SweepOptions{Empty: true, Threshold: 80})
	must(t, err)
	if after := len(w.packs()); after >= before {
		t.Errorf("%d packs before the sweep, %d after", before, after)
	}
	w.check()
	w.compare(second.Snapshot, next)
	for _, restic := range w.oracles() {
		if got := w.resticRestore(restic, second.Snapshot); !got.equals(next) {
			t.Errorf("%s restores %d other bytes of backup %.8s", restic, got.size, second.Snapshot)
		}
	}
}
