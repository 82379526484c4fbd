package controller

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/apimachinery/pkg/util/validation"

	"drover.io/drover/api"
)

// wish is an understood request.
type wish struct {
	spec            api.VolumeSpec // without Size
	required, limit int64
	image           imageWish
	source          *csi.VolumeContentSource
	cloneMode       string
	content         string // handle of the snapshot of type bi that the volume begins with
	prefer          string // the node of the first use, if known
	fromBackup      string // name or URL
	target          string // of backups
	note            string // for an event about the new volume; empty: none
}

// imageWish is the backing image that parameters name, and the recipe for a missing image.
type imageWish struct {
	name         string
	source       api.SourceType
	url          string
	parameters   map[string]string
	checksum     string
	copies       int32
	nodeSelector []string
	diskSelector []string
	secret       api.SecretRef
}

// parameter is one key of a StorageClass or VolumeAttributesClass.
type parameter struct {
	// set takes the value over; nil: not supported yet.
	set func(*wish, string) error
	// neutral are the values of an unsupported key that ask for nothing, and so are accepted.
	neutral []string
	// mutable keys may change on an existing volume.
	mutable bool
}

// parameters is the one table of keys: the users' keys of the field, so that existing StorageClasses work unchanged.
var parameters = map[string]parameter{
	"numberOfReplicas":    {set: setReplicas, mutable: true},
	"staleReplicaTimeout": {set: setStale, mutable: true},
	"dataLocality":        {set: setLocality, mutable: true},
	"replicaAutoBalance":  {set: setBalance, mutable: true},
	"fsType":              {set: setFSType},
	"mkfsParams":          {set: func(w *wish, v string) error { w.spec.MkfsParams = v; return nil }},
	"nodeSelector":        {set: func(w *wish, v string) error { return setTags(&w.spec.NodeSelector, v) }},
	"diskSelector":        {set: func(w *wish, v string) error { return setTags(&w.spec.DiskSelector, v) }},

	"replicaSoftAntiAffinity": {set: func(w *wish, v string) error {
		return setSoft(&w.spec.ReplicaSoftAntiAffinity, v)
	}, mutable: true},
	"replicaZoneSoftAntiAffinity": {set: func(w *wish, v string) error {
		return setSoft(&w.spec.ReplicaZoneSoftAntiAffinity, v)
	}, mutable: true},
	"replicaDiskSoftAntiAffinity": {set: func(w *wish, v string) error {
		return setSoft(&w.spec.ReplicaDiskSoftAntiAffinity, v)
	}, mutable: true},

	"freezeFilesystemForSnapshot": {set: setFreeze, mutable: true},
	"snapshotDataIntegrity":       {set: setIntegrity, mutable: true},
	"unmapMarkSnapChainRemoved": {set: func(w *wish, v string) error {
		return setSoft(&w.spec.UnmapMarkSnapChainRemoved, v)
	}, mutable: true},

	"fromBackup":      {set: func(w *wish, v string) error { w.fromBackup = v; return nil }},
	"backupBlockSize": {set: setBackupBlockSize},

	api.ParameterBackupTarget: {set: setBackupTarget},

	"backingImage":                     {set: setImage},
	"backingImageName":                 {set: setImage},
	"backingImageURL":                  {set: func(w *wish, v string) error { w.image.url = v; return nil }},
	"backingImageDataSourceType":       {set: setImageSource},
	"backingImageDataSourceParameters": {set: setImageParameters},
	"backingImageChecksum":             {set: setImageChecksum},
	"backingImageMinNumberOfCopies":    {set: setImageCopies},
	"backingImageNodeSelector":         {set: setImageNodes},
	"backingImageDiskSelector":         {set: setImageDisks},
	"backingImageSecretName":           {set: setImageSecret},
	"backingImageSecretNamespace":      {set: setImageSecretNamespace},

	"frontend":                {neutral: []string{"blockdev"}},
	"dataEngine":              {neutral: []string{"v1"}},
	"migratable":              {neutral: []string{"false"}},
	"share":                   {neutral: []string{"false"}},
	"exclusive":               {neutral: []string{"true", "false"}},
	"encrypted":               {neutral: []string{"false"}},
	"disableRevisionCounter":  {neutral: []string{"true", "false"}}, // there is no such counter
	"dataSource":              {},
	"cloneMode":               {set: setCloneMode}, // says nothing without a source
	"recurringJobSelector":    {neutral: []string{"[]"}},
	"ublkNumberOfQueue":       {},
	"ublkQueueDepth":          {},
	"nvmeTcpNrIoQueues":       {},
	"dataLayout.type":         {neutral: []string{"replicated"}},
	"dataLayout.mode":         {},
	"dataLayout.dataChunks":   {},
	"dataLayout.parityChunks": {},
	"dataLayout.stripSizeKB":  {},
	"nfsOptions":              {},
	"strictTopology":          {neutral: []string{"false"}},
	"volumeTopology":          {neutral: []string{"any"}},
	"storageCapacityMode":     {neutral: []string{"node"}},
}

// sidecarPrefix marks keys of the CSI sidecars (names of claims, secrets): not Drover's. A volume keeps the names of
// its claim (annotateClaim).
const sidecarPrefix = "csi.storage.k8s.io/"

// parseParameters takes the parameters over into w, in the order of their names, so that the same mistake gives the
// same answer.
func (w *wish) parseParameters(given map[string]string) error {
	for _, key := range slices.Sorted(maps.Keys(given)) {
		if strings.HasPrefix(key, sidecarPrefix) {
			continue
		}
		if err := w.setParameter(key, given[key]); err != nil {
			return err
		}
	}
	return nil
}

// parseMutable takes over parameters that may change on an existing volume, and refuses all others.
func (w *wish) parseMutable(given map[string]string) error {
	for _, key := range slices.Sorted(maps.Keys(given)) {
		if p, ok := parameters[key]; ok && !p.mutable {
			return api.Errorf(api.Invalid, "parameter %s cannot change on an existing volume; these can: %s", key,
				parameterNames(func(p parameter) bool { return p.mutable }))
		}
		if err := w.setParameter(key, given[key]); err != nil {
			return err
		}
	}
	return nil
}

func (w *wish) setParameter(key, value string) error {
	p, ok := parameters[key]
	switch {
	case !ok:
		return api.Errorf(api.Invalid, "parameter %.80q is unknown%s; known are: %s", key, suggestKey(key),
			parameterNames(func(p parameter) bool { return p.set != nil }))
	case p.set == nil && (value == "" || slices.Contains(p.neutral, value)):
		return nil
	case p.set == nil:
		msg := ""
		if len(p.neutral) > 0 {
			msg = "; leave it out, or give one of: " + strings.Join(p.neutral, ", ")
		}
		return api.Errorf(api.Invalid, "parameter %s=%.80q is not supported yet%s", key, value, msg)
	}
	if value == "" {
		return nil // as if absent
	}
	if err := p.set(w, value); err != nil {
		return api.Errorf(api.Invalid, "parameter %s=%.200q: %w", key, value, err)
	}
	return nil
}

func parameterNames(want func(parameter) bool) string {
	var names []string
	for name, p := range parameters {
		if want(p) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

// suggestKey suggests the key that differs in case alone.
func suggestKey(key string) string {
	for name := range parameters {
		if strings.EqualFold(name, key) {
			return " (did you mean " + name + "?)"
		}
	}
	return ""
}

// withoutSidecarKeys returns the parameters that a repeated call must give again.
func withoutSidecarKeys(all map[string]string) map[string]string {
	out := map[string]string{}
	for k, v := range all {
		if !strings.HasPrefix(k, sidecarPrefix) {
			out[k] = v
		}
	}
	if len(out) == 0 {
		return nil
	}
	return out
}

const maxReplicas = 20

func setReplicas(w *wish, v string) error {
	n, err := strconv.ParseInt(v, 10, 32)
	if err != nil || n < 1 || n > maxReplicas {
		return fmt.Errorf("want a number from 1 to %d", maxReplicas)
	}
	w.spec.NumberOfReplicas = int32(n)
	return nil
}

func setStale(w *wish, v string) error {
	n, err := strconv.ParseInt(v, 10, 32)
	if err != nil || n < 1 {
		return fmt.Errorf("want minutes, at least 1")
	}
	w.spec.StaleReplicaTimeout = int32(n)
	return nil
}

func setLocality(w *wish, v string) error {
	switch v {
	case "disabled", "best-effort", "strict-local":
		w.spec.DataLocality = v
		return nil
	}
	return fmt.Errorf("want disabled, best-effort or strict-local")
}

func setBalance(w *wish, v string) error {
	switch v {
	case "ignored", "disabled", "least-effort", "best-effort":
		w.spec.ReplicaAutoBalance = v
		return nil
	}
	return fmt.Errorf("want ignored, disabled, least-effort or best-effort")
}

// strictLocal refuses a volume that is to be on its node alone and has replicas on other nodes.
func strictLocal(spec *api.VolumeSpec) error {
	if spec.DataLocality == localStrict && spec.NumberOfReplicas > 1 {
		return api.Errorf(api.Invalid, "dataLocality strict-local and %d replicas: such a volume has one replica, on the "+
			"node that uses it; set numberOfReplicas to 1, or choose best-effort", spec.NumberOfReplicas)
	}
	return nil
}

const localStrict = "strict-local"

func setSoft(to *string, v string) error {
	switch v {
	case "ignored", "enabled", "disabled":
		*to = v
		return nil
	}
	return fmt.Errorf("want ignored, enabled or disabled")
}

func setFreeze(w *wish, v string) error {
	if word, ok := map[string]string{"true": "enabled", "false": "disabled"}[v]; ok {
		v = word
	}
	if err := setSoft(&w.spec.FreezeFilesystemForSnapshot, v); err != nil {
		return fmt.Errorf("want true, false or ignored (or enabled, disabled)")
	}
	return nil
}

func setIntegrity(w *wish, v string) error {
	switch v {
	case "ignored", "enabled", "fast-check", "disabled":
		w.spec.SnapshotDataIntegrity = v
		return nil
	}
	return fmt.Errorf("want ignored, enabled, fast-check or disabled")
}

func setCloneMode(w *wish, v string) error {
	switch v {
	case api.CloneFull, "linked-clone", api.CloneLinked:
		w.cloneMode = v
		return nil
	}
	return fmt.Errorf("want linked-clone or full-copy")
}

// minFSSize is the smallest volume that each file system's own tools accept.
var minFSSize = map[string]int64{"ext4": api.MinVolumeSize, "xfs": 300 << 20, "btrfs": 128 << 20}

func setFSType(w *wish, v string) error {
	if _, ok := minFSSize[v]; !ok {
		return fmt.Errorf("want ext4, xfs or btrfs")
	}
	w.spec.FSType = v
	return nil
}

func setTags(to *[]string, v string) error {
	*to = nil
	for tag := range strings.SplitSeq(v, ",") {
		if tag = strings.TrimSpace(tag); tag == "" {
			return fmt.Errorf("want tags separated by commas")
		}
		*to = append(*to, tag)
	}
	return nil
}

func setImageNodes(w *wish, v string) error { return setTags(&w.image.nodeSelector, v) }
func setImageDisks(w *wish, v string) error { return setTags(&w.image.diskSelector, v) }

// setBackupBlockSize accepts the sizes of Longhorn, so that existing StorageClasses work. The format has one size.
func setBackupBlockSize(w *wish, v string) error {
	switch v {
	case "2Mi", "2097152":
	case "16Mi", "16777216":
		w.note = "parameter backupBlockSize=" + v + " has no effect: backups have chunks of 2Mi"
	default:
		return fmt.Errorf("leave it out, or give 2Mi or 16Mi, which has no effect: backups have chunks of 2Mi")
	}
	return nil
}

func setBackupTarget(w *wish, v string) error {
	if !api.CanNameTarget(v) {
		return fmt.Errorf("not a name that a BackupTarget can have")
	}
	w.target = v
	return nil
}

func setImage(w *wish, v string) error {
	if msgs := validation.IsDNS1123Subdomain(v); len(msgs) > 0 {
		return fmt.Errorf("not a name that a backing image can have: %s", msgs[0])
	}
	if w.image.name != "" && w.image.name != v {
		return fmt.Errorf("backingImage and backingImageName differ; give one of them")
	}
	w.image.name, w.spec.BackingImage = v, v
	return nil
}

func setImageSource(w *wish, v string) error {
	switch t := api.SourceType(v); t {
	case api.SourceDownload, api.SourceRegistry, api.SourceClone, api.SourceExport, api.SourceRestore:
		w.image.source = t
		return nil
	case api.SourceUpload, api.SourceFile:
		return fmt.Errorf("an image of this source must exist before a volume names it: create it first")
	}
	return fmt.Errorf("want clone, download, export-from-volume, registry or restore")
}

func setImageSecret(w *wish, v string) error {
	if msgs := validation.IsDNS1123Subdomain(v); len(msgs) > 0 {
		return fmt.Errorf("not a name that a Secret can have: %s", msgs[0])
	}
	w.image.secret.Name = v
	return nil
}

func setImageSecretNamespace(w *wish, v string) error {
	if msgs := validation.IsDNS1123Label(v); len(msgs) > 0 {
		return fmt.Errorf("not a name that a namespace can have: %s", msgs[0])
	}
	w.image.secret.Namespace = v
	return nil
}

func setImageParameters(w *wish, v string) error {
	var raw map[string]any
	d := json.NewDecoder(strings.NewReader(v))
	d.UseNumber() // as they were written
	err := d.Decode(&raw)
	if err == nil && d.Decode(new(any)) != io.EOF {
		err = errors.New("more data follows the object")
	}
	if err != nil {
		return fmt.Errorf(`want a JSON object such as {"url":"https://..."}: %w`, err)
	}
	w.image.parameters = map[string]string{}
	for k, x := range raw {
		switch x := x.(type) {
		case string:
			w.image.parameters[k] = x
		case bool, json.Number:
			w.image.parameters[k] = fmt.Sprint(x)
		default:
			return fmt.Errorf("the value of %q is neither text nor a number", k)
		}
	}
	return nil
}

func setImageChecksum(w *wish, v string) error {
	v = strings.ToLower(v)
	if len(v) != 128 || strings.Trim(v, "0123456789abcdef") != "" {
		return fmt.Errorf("want a SHA-512 of 128 hexadecimal digits")
	}
	w.image.checksum = v
	return nil
}

func setImageCopies(w *wish, v string) error {
	n, err := strconv.ParseInt(v, 10, 32)
	if err != nil || n < 1 {
		return fmt.Errorf("want a number, at least 1")
	}
	w.image.copies = int32(n)
	return nil
}

// completeSource joins the two ways to name a source's url, and refuses image parameters without an image.
func (i *imageWish) completeSource() error {
	if i.name == "" {
		if i.source != "" || i.url != "" || i.parameters != nil || i.checksum != "" || i.copies != 0 ||
			i.nodeSelector != nil || i.diskSelector != nil || i.secret != (api.SecretRef{}) {
			return api.Errorf(api.Invalid, "parameters describe a backing image, but backingImage does not name it")
		}
		return nil
	}
	if i.url != "" {
		if i.source == "" {
			i.source = api.SourceDownload
			if strings.HasPrefix(i.url, api.RegistryScheme) {
				i.source = api.SourceRegistry
			}
		}
		if u, ok := i.parameters["url"]; ok && u != i.url {
			return api.Errorf(api.Invalid, "backingImageURL and the url in backingImageDataSourceParameters differ")
		}
		if i.parameters == nil {
			i.parameters = map[string]string{}
		}
		i.parameters["url"] = i.url
	}
	if i.parameters != nil && i.source == "" {
		return api.Errorf(api.Invalid,
			"backingImageDataSourceParameters needs backingImageDataSourceType, which names the kind of source")
	}
	if (i.source == api.SourceDownload || i.source == api.SourceRegistry) && i.parameters["url"] == "" {
		return api.Errorf(api.Invalid, "a backing image of source %s needs a url: give backingImageURL", i.source)
	}
	if i.secret.Namespace != "" && i.secret.Name == "" {
		return api.Errorf(api.Invalid, "backingImageSecretNamespace without backingImageSecretName")
	}
	if i.secret.Name != "" && i.source != api.SourceDownload && i.source != api.SourceRegistry {
		return api.Errorf(api.Invalid,
			"backingImageSecretName is for a backing image of a server: give backingImageURL, too")
	}
	if i.secret.Name != "" && i.secret.Namespace == "" {
		i.secret.Namespace = api.DefaultSecretNamespace
	}
	return nil
}
