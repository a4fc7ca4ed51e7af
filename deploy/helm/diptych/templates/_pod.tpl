{{- /* What the pods of all parts have in common. */ -}}

{{- define "diptych.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.runAs.user }}
runAsGroup: {{ int64 .Values.runAs.group }}
fsGroup: {{ int64 .Values.runAs.group }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "diptych.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* The beginning of a pod's spec: whose it is, where it may run, how it is spread. */ -}}
{{- define "diptych.podHead" -}}
{{- $root := .root }}{{ $given := .given }}
serviceAccountName: {{ include "diptych.serviceAccount" $root | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext: {{- include "diptych.podSecurity" $root | nindent 2 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
topologySpreadConstraints:
{{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "diptych.selector" $ | nindent 8 }}
{{- end }}
{{- with $given.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $given.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $given.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $given.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
terminationGracePeriodSeconds: {{ add $given.preStopSeconds $given.drainSeconds 15 }}
{{- end }}

{{- define "diptych.modelContainer" -}}
{{- $v := .root.Values -}}
{{- if not $v.model.path }}
initContainers:
  - name: model
    image: {{ include "diptych.image" . | quote }}
    imagePullPolicy: {{ $v.image.pullPolicy }}
    command: [diptych, model, fetch]
    args: [{{ $v.model.name | quote }}, --cache-dir=/models, --link=/model/current]
    env:
      - {name: HOME, value: /tmp}
{{- with $v.model.tokenSecret }}
{{- if .name }}
      - name: HF_TOKEN
        valueFrom: {secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}}
{{- end }}
{{- end }}
{{- with $v.model.env }}
{{- toYaml . | nindent 6 }}
{{- end }}
    securityContext: {{- include "diptych.containerSecurity" .root | nindent 6 }}
    resources: {{- include "diptych.resources" $v.model.resources | nindent 6 }}
    volumeMounts:
      - {name: models, mountPath: /models}
      - {name: model, mountPath: /model}
      - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}

{{- /* Flags of every process about who is believed. */ -}}
{{- define "diptych.trustArgs" -}}
{{- if .Values.clusterSecret.enabled }}
- --cluster-secret-file=/etc/diptych/cluster/secret
{{- end }}
{{- if .Values.tls.enabled }}
- --tls-cert=/etc/diptych/tls/tls.crt
- --tls-key=/etc/diptych/tls/tls.key
- --tls-ca=/etc/diptych/tls/ca.crt
- --tls-client-ca=/etc/diptych/tls/ca.crt
- {{ printf "--tls-server-name=%s" .Values.tls.serverName | quote }}
{{- end }}
{{- end }}

{{- define "diptych.redisArgs" -}}
{{- if .Values.redis.enabled }}
- {{ printf "--registry=redis://%s-redis:6379/0" (include "diptych.fullname" .) | quote }}
- --registry-password-file=/etc/diptych/redis/password
{{- else if .Values.redis.external.url }}
- {{ printf "--registry=%s%s" .Values.redis.external.url (ternary "?ssl_ca_certs=/etc/diptych/redis-ca/ca.crt" "" (ne .Values.redis.external.caSecret "")) | quote }}
{{- if .Values.redis.external.passwordSecret }}
- --registry-password-file=/etc/diptych/redis/password
{{- end }}
{{- end }}
{{- end }}

{{- /* Where models are, and the link to the one that is served. With a model of the image there is neither. */ -}}
{{- define "diptych.claim" -}}
{{ if .Values.model.volume.create }}{{ include "diptych.fullname" . }}-models{{ else }}{{ .Values.model.volume.existingClaim }}{{ end }}
{{- end }}

{{- define "diptych.mounts" -}}
{{- if or (include "diptych.claim" .) (not .Values.model.path) }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if not .Values.model.path }}
- {name: model, mountPath: /model, readOnly: true}
{{- end }}
- {name: tmp, mountPath: /tmp}
{{- if .Values.clusterSecret.enabled }}
- {name: cluster, mountPath: /etc/diptych/cluster, readOnly: true}
{{- end }}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /etc/diptych/tls, readOnly: true}
{{- end }}
{{- if include "diptych.redisSecretName" . }}
- {name: redis, mountPath: /etc/diptych/redis, readOnly: true}
{{- end }}
{{- if .Values.redis.external.caSecret }}
- {name: redis-ca, mountPath: /etc/diptych/redis-ca, readOnly: true}
{{- end }}
{{- end }}

{{- /* Secrets are for the group of the process: nobody else reads them. */ -}}
{{- define "diptych.volumes" -}}
{{- if include "diptych.claim" . }}
- name: models
  persistentVolumeClaim: {claimName: {{ include "diptych.claim" . | trim | quote }}}
{{- else if not .Values.model.path }}
- {name: models, emptyDir: {}}
{{- end }}
{{- if not .Values.model.path }}
- {name: model, emptyDir: {}}
{{- end }}
- {name: tmp, emptyDir: {}}
{{- if .Values.clusterSecret.enabled }}
- name: cluster
  secret: {secretName: {{ include "diptych.clusterSecretName" . | quote }}, defaultMode: 0440}
{{- end }}
{{- if .Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "diptych.tlsSecretName" . | quote }}, defaultMode: 0440}
{{- end }}
{{- with include "diptych.redisSecretName" . }}
- name: redis
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- with .Values.redis.external.caSecret }}
- name: redis-ca
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- end }}
