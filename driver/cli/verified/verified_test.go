package verified

import (
	"strings"
	"testing"

	"drover.io/drover/api"
)

// TestTextsNameObjectAndRemedy: the texts of a repository and of a store of Longhorn name backups and remedies, and an
// intact target has no damage.
func TestTextsNameObjectAndRemedy(t *testing.T) {
	target := &api.BackupTarget{}
	target.Name = "old"
	v := &api.VerificationFact{Packs: 2, Bytes: 4 << 20}
	target.Status.Verification = v
	if text := Damage(target); text != "" {
		t.Errorf("an intact target: %s", text)
	}
	v.DamagedBlobs, v.DamagedBackups, v.BackupNames, v.BlobNames = 1, 1, []string{"b"}, []string{"1f3a"}
	for format, words := range map[string][2]string{
		api.FormatRestic: {"--full", "4 MiB in 2 packs read, 0 blobs healed"}, api.FormatLonghorn: {"with Longhorn", "2 blocks read"}} {
		target.Status.Format = format
		if text := Damage(target); !strings.Contains(text, words[0]) || !strings.Contains(text, "1 backup (b)") ||
			!strings.Contains(text, "1f3a") {
			t.Errorf("%s: %s", format, text)
		}
		if text := Summary(target); !strings.HasSuffix(text, words[1]) {
			t.Errorf("%s: %s", format, text)
		}
	}
	target.Status.Format = api.FormatRestic
	v.DamagedBlobs, v.BlobNames, v.ObjectNames = 0, nil, []string{"snapshots/77"}
	if text := Damage(target); !strings.Contains(text, "nothing repairs 1 backup (b)") ||
		!strings.Contains(text, "snapshots/77") {
		t.Errorf("a lost backup: %s", text)
	}
	v.DamagedBackups, v.BackupNames, v.ObjectNames = 0, nil, []string{"keys/77"}
	if text := Damage(target); !strings.Contains(text, "no backup is") || !strings.Contains(text, "keys/77") {
		t.Errorf("a damaged key file: %s", text)
	}
	target.Status.Usage = &api.UsageFact{UsedBytes: 9 << 20}
	if n := Total(target); n != 9<<20 {
		t.Errorf("a verification reads %d bytes", n)
	}
	b := &api.Backup{}
	b.Name = "b"
	for want, d := range map[string]*api.DigestsFact{"": nil, "on node n": {Node: "n", Percent: 100},
		"no: node n knows the digests of 99 %; run `drover backup verify b`": {Node: "n", Percent: 99}} {
		if b.Status.Digests = d; AtOnce(b) != want {
			t.Errorf("%+v: %s", d, AtOnce(b))
		}
	}
}
