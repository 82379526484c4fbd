package sanity_test

import (
	"bufio"
	"context"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// standbyFollows: a standby volume follows the backups that another cluster makes in a store. Each one costs the store
// the changed bytes, also after kill -9 in the middle, and the volume grows with the followed one. The activation
// takes a backup that Drover has not seen before. Another standby volume, whose store is away, begins with the backup
// that it holds.
func standbyFollows(t *testing.T, w *world) {
	stages, want := followedBackups(t, w)
	store, password := t.TempDir(), t.TempDir()+"/password"
	must(t, os.WriteFile(password, []byte(backupPassword+"\n"), 0o600))
	appear := func(stage int) { // the other cluster makes a backup
		if out, err := exec.Command("cp", "-a", stages[stage]+"/.", store).CombinedOutput(); err != nil {
			t.Fatalf("cp: %v: %s", err, out)
		}
	}
	appear(0)
	w.must("target", "create", "dr", "file://"+store, "--password-file", password)
	before := w.restored(t, "store")
	w.must("volume", "create", "standby", "--standby", "--from-backup", "followed", "--target", "dr")
	holds := func(volume, backup string) *api.Volume {
		return w.awaitVolume(volume, func(v *api.Volume) bool {
			return v.Status.LastBackup == backup && v.Status.Standby.Next == nil
		})
	}
	holds("standby", "one")
	if n := w.restored(t, "store") - before; n != 48*mib {
		t.Errorf("the first backup costs the store %d bytes, want 48 MiB", n)
	}
	for _, use := range []string{"volume attach standby", "volume expand standby +10Mi", "snapshot create standby",
		"backup create standby --target dr", "volume create clone --from standby"} {
		w.refused(5, "drover volume activate standby", strings.Fields(use)...)
	}

	appear(1)
	w.must("target", "sync", "dr")
	holds("standby", "two")
	if n := w.restored(t, "store") - before; n != 52*mib {
		t.Errorf("two backups cost the store %d bytes, want 48 MiB and the changed 4 MiB", n)
	}

	setRate := func(rate int64) {
		var target api.BackupTarget
		must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: "dr"}, &target))
		base := target.DeepCopy()
		target.Spec.MaxDownloadRate = rate
		must(t, w.objects.Patch(t.Context(), &target, client.MergeFrom(base)))
	}
	setRate(128 << 10) // half a minute for the changes; the node knows it when the next volume holds its backup
	w.must("volume", "create", "other", "--standby", "--from-backup", "followed", "--target", "dr")
	holds("other", "two") // from the disk
	appear(2)
	w.must("target", "sync", "dr")
	w.awaitVolume("standby", func(v *api.Volume) bool {
		next := v.Status.Standby.Next
		return v.Status.LastBackup == "two" && next != nil && next.Size == 192*mib && v.Spec.Size == 128*mib
	})
	w.killAll()
	w.start(drover(t))
	setRate(0)
	if v := holds("standby", "three"); v.Status.Size != 192*mib || v.Spec.Size != 192*mib {
		t.Errorf("the standby volume has %d bytes, and the followed one 192 MiB", v.Status.Size)
	}
	holds("other", "three")
	if n := w.restored(t, "store"); n > 8*mib {
		t.Errorf("after the kill the store sends %d bytes, want at most the changed 4 MiB for each volume", n)
	}

	appear(3) // nobody asks for a list but the activation
	w.must("volume", "activate", "standby")
	if v := w.volume("standby"); v.Status.LastBackup != "four" || v.Status.IsStandby {
		t.Errorf("the activated volume begins with %q", v.Status.LastBackup)
	}
	w.compareActivated(t, "standby", want[3])

	holds("other", "four")
	away := store + "-away"
	must(t, os.Rename(store, away))
	out := w.must("volume", "activate", "other")
	if !strings.Contains(out, "backup four") || !strings.Contains(out, "without an answer of the store") {
		t.Errorf("the activation without the store says %q", out)
	}
	w.compareActivated(t, "other", want[3])
	for _, v := range []string{"standby", "other"} {
		w.must("volume", "detach", v)
		w.must("volume", "delete", v)
	}
	must(t, os.Rename(away, store))
	w.must("target", "delete", "dr", "--force")
	if !comes(func() bool { return !strings.Contains(w.must("image", "list", "--all"), "restore-") }) {
		t.Errorf("hidden images are left: %s", w.must("image", "list", "--all"))
	}
}

// followedBackups makes four backups of a volume that is deleted then, and returns the store and the volume's content
// after each.
func followedBackups(t *testing.T, w *world) (stages []string, contents [][]byte) {
	store := w.makeTarget(t, "followed")
	p, err := w.create("followed", 128*mib, blockCap())
	must(t, err)
	must(t, p.up())
	d := openDevice(t, p, 128*mib)
	back := func(name string) {
		w.must("backup", "create", "followed", "--name", name, "--target", "followed")
		dir := t.TempDir()
		if out, err := exec.Command("cp", "-a", store+"/.", dir).CombinedOutput(); err != nil {
			t.Fatalf("cp: %v: %s", err, out)
		}
		stages, contents = append(stages, dir), append(contents, append([]byte(nil), d.want...))
	}
	d.write(0, 32*mib)
	d.write(96*mib, 16*mib)
	back("one")
	d.write(4*mib, 2*mib)
	d.write(64*mib, 2*mib)
	back("two")
	must(t, d.f.Close())
	must(t, p.down())
	w.must("volume", "expand", "followed", "192Mi")
	must(t, p.up())
	d.f = openDevice(t, p, 192*mib).f
	d.want = append(d.want, make([]byte, 64*mib)...)
	d.write(160*mib, 2*mib)
	d.write(8*mib, 2*mib)
	back("three")
	d.write(162*mib, 2*mib)
	back("four")
	must(t, d.f.Close())
	do(t, p.down, p.remove)
	w.must("target", "delete", "followed", "--force")
	w.awaitNoLayers(t) // the standby volumes are in another cluster
	return stages, contents
}

// compareActivated attaches an activated volume and compares its content.
func (w *world) compareActivated(t *testing.T, volume string, want []byte) {
	t.Helper()
	w.must("volume", "attach", volume)
	var att api.Attachment
	must(t, w.objects.Get(t.Context(), client.ObjectKey{Name: volume}, &att))
	compareWithDevice(t, &pod{target: att.Status.Device}, want)
}

// restored is the metric of the bytes that restores took from a source since the start of serve.
func (w *world) restored(t *testing.T, source string) (n int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), settle)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, w.metrics, nil)
	must(t, err)
	resp, err := http.DefaultClient.Do(req)
	must(t, err)
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if text, is := strings.CutPrefix(lines.Text(), "drover_restored_bytes_total{source=\""+source+"\"} "); is {
			f, err := strconv.ParseFloat(text, 64)
			must(t, err)
			n = int64(f)
		}
	}
	return n
}
