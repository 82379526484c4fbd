package api_test

import (
	"reflect"
	"testing"

	"drover.io/drover/api"
)

// TestRecordOfAVolumeHasTheTargetOfItsBackups: a volume that takes a record over, read from a store, has the parameter
// for the target of its backups, and no other parameter of the recorded volume.
func TestRecordOfAVolumeHasTheTargetOfItsBackups(t *testing.T) {
	origin := &api.Volume{Spec: api.VolumeSpec{NumberOfReplicas: 2, DataLocality: api.LocalityBestEffort,
		Parameters: map[string]string{api.ParameterBackupTarget: "offsite", "fsType": "xfs"}}}
	var v api.Volume
	api.ParseRecordedVolume(api.RecordVolume(origin).Encode()).ApplyTo(&v)
	if got := v.Spec.Parameters; !reflect.DeepEqual(got, map[string]string{api.ParameterBackupTarget: "offsite"}) ||
		v.BackupTarget() != "offsite" || v.Spec.NumberOfReplicas != 2 {
		t.Errorf("%+v", v.Spec)
	}
	v = api.Volume{}
	api.ParseRecordedVolume(api.RecordVolume(&api.Volume{}).Encode()).ApplyTo(&v)
	if v.Spec.Parameters != nil || v.BackupTarget() != api.DefaultBackupTarget {
		t.Errorf("%+v", v.Spec)
	}
}
